"""What a run must know of an output row that an earlier run wrote: which it is, how it ended.

Reads cbgen's own rows and the lines of batch files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from cbgen.io.openai_responses import LINE_ID

FINISH_REASONS = ("stop", "length", "cancelled", "error")
"""How a row can have ended."""


@dataclass(frozen=True, slots=True)
class RowFacts:
    """Facts of one row."""

    index: int
    finish_reason: str
    """One of FINISH_REASONS, or what another version wrote."""
    error_code: str | None = None
    """Set where the row failed."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


def read_facts(line: bytes) -> RowFacts | None:
    """Return the facts of a row, None where the line is none."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(row, dict):
        return None
    if "custom_id" in row and "response" in row:
        return _batch_line_facts(row)
    index, reason = row.get("index"), row.get("finish_reason")
    if type(index) is not int or index < 0 or not isinstance(reason, str):
        return None
    error = row.get("error")
    if error is not None:
        return RowFacts(index, "error", _code(error))
    return RowFacts(index, reason, None, *_tokens(row))


def _batch_line_facts(row: Mapping[str, Any]) -> RowFacts | None:
    name = LINE_ID.fullmatch(str(row.get("id")))
    if name is None:
        return None
    index = int(name.group(1), 16)
    response = _object(row["response"])
    body = _object(response.get("body"))
    error = row.get("error") or body.get("error")
    if error is not None or response.get("status_code") != 200:
        return RowFacts(index, "error", _code(error))
    choices = body.get("choices")
    reason = _object(choices[0]).get("finish_reason") if isinstance(choices, list) else None
    return RowFacts(index, str(reason), None, *_tokens(body))


def _tokens(holder: Mapping[str, Any]) -> tuple[int, int]:
    usage = _object(holder.get("usage"))
    return int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)


def _code(error: object) -> str:
    held = _object(error)
    return str(held.get("code") or _object(held.get("error")).get("code") or "error")


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
