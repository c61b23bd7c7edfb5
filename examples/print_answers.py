"""Print the first answers of an output file for people.

Usage: python examples/print_answers.py out.jsonl [how many]
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> int:
    """Print the first rows of the file that `arguments` names (5 unless a number follows)."""
    path = Path(arguments[0])
    count = int(arguments[1]) if len(arguments) > 1 else 5
    with path.open(encoding="utf-8") as rows:
        for line in islice(rows, count):
            print(describe(json.loads(line)))
    return 0


def describe(row: dict[str, Any]) -> str:
    """Return one output row as a short paragraph: what was asked, what was answered."""
    messages = row.get("messages") or [{"content": ""}]
    question = row.get("prompt") or messages[-1]["content"]
    texts = [choice["text"] for choice in row.get("choices") or [row]]
    if row["error"] is not None:
        texts = [f"error: {row['error']['message']}"]
    return "\n".join([f"[{row['id']}] {question}", *(f"    {text.strip()}" for text in texts), ""])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
