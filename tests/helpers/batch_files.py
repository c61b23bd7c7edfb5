"""Lines of OpenAI Batch and vLLM run-batch files."""

from __future__ import annotations

from typing import Any

from cbgen.io.dialects import InputFormat, with_dialect
from cbgen.io.openai.requests import CHAT_URL, COMPLETION_URL
from cbgen.io.records import Record
from tests.helpers.records import make_record

USER = {"role": "user", "content": "Hi"}


def chat_line(custom_id: object = "a", **body: Any) -> dict[str, Any]:
    """Return a line that asks for a chat completion."""
    return _line(custom_id, CHAT_URL, {"model": "m", "messages": [USER], **body})


def completion_line(custom_id: object = "a", **body: Any) -> dict[str, Any]:
    """Return a line that asks for a completion."""
    return _line(custom_id, COMPLETION_URL, {"model": "m", "prompt": "Hi", **body})


def line_record(
    columns: dict[str, Any], input_format: InputFormat = "openai", **changes: Any
) -> Record:
    """Return the record of a line, read in this format."""
    return with_dialect(make_record(columns, **changes), input_format)


def _line(custom_id: object, url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
