"""What a run must know of an output row that an earlier run wrote: which it is, how it ended.

Reads cbgen's own rows and the lines of batch files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from cbgen.io.openai.responses import LINE_ID

FINISH_REASONS = ("stop", "length", "cancelled", "error")
"""How a row can have ended."""


@dataclass(frozen=True, slots=True)
class RowFacts:
    """Facts of one row."""

    index: int
    finish_reasons: tuple[str, ...]
    """How each of its samples ended: of FINISH_REASONS, or what another version wrote."""
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
    index, choices = row.get("index"), row.get("choices")
    if type(index) is not int or index < 0:
        return None
    reasons = _reasons([row] if choices is None else choices)  # a parquet file has both columns
    if not all(isinstance(reason, str) for reason in reasons):
        return None
    error = row.get("error")
    if error is not None:
        return _failed(index, error)
    return RowFacts(index, reasons, None, *_tokens(row))


def _batch_line_facts(row: Mapping[str, Any]) -> RowFacts | None:
    name = LINE_ID.fullmatch(str(row.get("id")))
    if name is None:
        return None
    index = int(name.group(1), 16)
    response = _object(row["response"])
    body = _object(response.get("body"))
    error = row.get("error") or body.get("error")
    if error is not None or response.get("status_code") != 200:
        return _failed(index, error)
    reasons = (str(reason) for reason in _reasons(body.get("choices")))
    return RowFacts(index, tuple(reasons), None, *_tokens(body))


def _failed(index: int, error: object) -> RowFacts:
    return RowFacts(index, ("error",), _code(error))


def _reasons(choices: object) -> tuple[Any, ...]:
    """Return the finish reason of each choice; one that is None where there are no choices."""
    held = choices if isinstance(choices, list) and choices else [None]
    return tuple(_object(choice).get("finish_reason") for choice in held)


def _tokens(holder: Mapping[str, Any]) -> tuple[int, int]:
    usage = _object(holder.get("usage"))
    return int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)


def _code(error: object) -> str:
    held = _object(error)
    return str(held.get("code") or _object(held.get("error")).get("code") or "error")


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
