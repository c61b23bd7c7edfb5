"""The dialects of rows: cbgen's own, and the lines of batch files of OpenAI and vLLM.

Which dialect a record is in, what its prompt is, and what an output row says when it is read back;
rows.py and openai/responses.py lay them out. Chat templates, tokens, the vocabulary and the meaning
of `generation_config` are the job's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import orjson

from cbgen.errors import RowError
from cbgen.io.openai.requests import BATCH_LINE_FIELDS, read_batch_request
from cbgen.io.openai.responses import index_of_line
from cbgen.io.prompts import Prompt, check_messages, check_token_ids, check_tools, invalid
from cbgen.io.records import Record
from cbgen.io.rows import RowOutcome
from cbgen.io.template import Template
from cbgen.values import show

InputFormat = Literal["auto", "cbgen", "openai", "vllm"]
"""auto: a line is what its form says; openai, vllm: all are lines of a batch; cbgen: none is."""

_FORMS = ("prompt", "messages", "prompt_token_ids", "input_ids")


def with_dialect(record: Record, input_format: InputFormat) -> Record:
    """Return the record with its dialect and its `custom_id` as id, if it is a line of a batch.

    A line of a batch without a `custom_id` that is a string carries an error.
    """
    dialect: Literal["openai", "vllm"] = "openai"
    if input_format in ("openai", "vllm"):
        dialect = "vllm" if input_format == "vllm" else "openai"
    elif input_format == "cbgen" or not _is_batch_line(record.columns):
        return record
    columns = record.columns
    if columns is None:
        return replace(record, dialect=dialect)
    custom_id = columns.get("custom_id")
    if isinstance(custom_id, str):
        # A bad `id` is no fault of a line whose id is another field.
        has_bad_id = record.error is not None and record.error.code == "invalid_id"
        error = None if has_bad_id else record.error
        return replace(record, dialect=dialect, id=custom_id, error=error)
    problem = "is missing" if custom_id is None else f"must be a string, got {show(custom_id)}"
    error = RowError("invalid_custom_id", f"{record.place}: custom_id {problem}")
    return replace(record, dialect=dialect, id=None, error=error)


def _is_batch_line(columns: Mapping[str, Any] | None) -> bool:
    if columns is None or "custom_id" not in columns:
        return False
    return all(name in columns for name in BATCH_LINE_FIELDS)


def parse_prompt(record: Record, *, template: Template | None) -> Prompt:
    """Read the prompt of a record.

    With a template the row's columns are only columns: the prompt is the filled template. A field
    that is null counts as absent. A record that has a dialect is read as a line of a batch file.

    Raises:
        RowError: the record has an error already, holds none or several of the forms, or its form
            is wrong.
    """
    if record.error is not None:
        raise record.error
    if record.dialect is not None:
        return read_batch_request(record)
    columns = record.columns
    assert columns is not None, "a record without error has columns"
    if columns.get("continuation") is not None:
        raise RowError(
            "unsupported", "continuation: scoring a given text is not supported yet; leave it out"
        )
    generation_config = _generation_config(columns)
    if template is not None:
        return Prompt(text=template.render(columns), generation_config=generation_config)
    form = _form(columns)
    value = columns[form]
    if form == "prompt":
        if not isinstance(value, str):
            raise invalid("prompt", "must be a string (token ids go into prompt_token_ids)", value)
        return Prompt(text=value, generation_config=generation_config)
    if form == "messages":
        return Prompt(
            messages=check_messages(value),
            tools=check_tools(columns.get("tools")),
            generation_config=generation_config,
        )
    return Prompt(prompt_ids=check_token_ids(form, value), generation_config=generation_config)


def _form(columns: dict[str, Any]) -> str:
    forms = [name for name in _FORMS if columns.get(name) is not None]
    if len(forms) == 1:
        return forms[0]
    if forms:
        raise RowError(
            "ambiguous_prompt", f"the row holds {' and '.join(forms)}; it must hold one of them"
        )
    present = ", ".join(columns) or "none"
    raise RowError(
        "no_prompt", f"the row holds no prompt: {_remedy(columns)}; its columns: {present}"
    )


def _remedy(columns: dict[str, Any]) -> str:
    if "custom_id" not in columns or "body" not in columns:
        return f"give it one of {', '.join(_FORMS)}, or set prompt.template"
    missing = [name for name in BATCH_LINE_FIELDS if name not in columns]
    if missing:
        return f"a line of a batch file needs {' and '.join(missing)}, too"
    return "it is a line of a batch file, which --format auto, openai and vllm read"


def _generation_config(columns: dict[str, Any]) -> dict[str, Any] | None:
    value = columns.get("generation_config")
    if value is not None and not isinstance(value, dict):
        raise invalid("generation_config", "must be an object", value)
    return value


def read_outcome(line: bytes) -> RowOutcome | None:
    """Return what an output row of any dialect says of its record; None if it is none."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(row, dict):
        return None
    index, error, choices, usage = map(row.get, ("index", "error", "choices", "usage"))
    if choices is None:  # in a parquet file a row of one sample has this column too
        choices = [row]
    if "custom_id" in row and "response" in row:
        response = _as_object(row["response"])
        body = _as_object(response.get("body"))
        index, choices, usage = index_of_line(row), body.get("choices"), body.get("usage")
        error = error or body.get("error")
        if error is not None or response.get("status_code") != 200:
            error, choices = error or {}, [{"finish_reason": "error"}]
    choices = choices if isinstance(choices, list) else []
    reasons: list[Any] = [_as_object(choice).get("finish_reason") for choice in choices]
    if type(index) is not int or index < 0 or not reasons:
        return None
    if not all(isinstance(reason, str) for reason in reasons):
        return None
    if error is not None:
        held = _as_object(error)
        code = held.get("code") or _as_object(held.get("error")).get("code") or "error"
        return RowOutcome(index, ("error",), str(code))
    tokens = (_as_object(usage).get(f"{name}_tokens") for name in ("prompt", "completion"))
    return RowOutcome(index, tuple(reasons), None, *(int(count or 0) for count in tokens))


def _as_object(value: object) -> Mapping[str, Any]:
    """Return a JSON object, an empty one in place of any other value."""
    return value if isinstance(value, dict) else {}
