"""The dialects of rows: cbgen's own, and the lines of batch files of OpenAI and vLLM.

Which dialect a record is in, what its prompt is, how its output row is laid out, and what such a
row says when it is read back. Chat templates, tokens, the vocabulary and the meaning of
`generation_config` are the job's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import orjson

from cbgen.errors import RowError
from cbgen.io.openai.requests import BATCH_LINE_FIELDS, read_batch_request
from cbgen.io.openai.responses import BatchRun, OpenAILines, VllmLines, outcome_of_line
from cbgen.io.prompts import Prompt, check_messages, check_token_ids, check_tools, invalid
from cbgen.io.records import Record
from cbgen.io.rows import Answer, OutputRows, RowOutcome, outcome_of
from cbgen.io.template import Template
from cbgen.values import show

InputFormat = Literal["auto", "cbgen", "openai", "vllm"]
"""auto: a line is what its form says; openai, vllm: all are lines of a batch; cbgen: none is."""

_FORMS = ("prompt", "messages", "prompt_token_ids", "input_ids")


class RowDialect(Protocol):
    """Lays out the output rows of the records of one dialect."""

    def answer(self, record: Record, answer: Answer) -> dict[str, Any]:
        """Return the row of a record that was answered."""

    def failure(self, record: Record, error: RowError) -> dict[str, Any]:
        """Return the row of a record that could not be answered."""


def row_dialects(
    *,
    columns: Literal["all", "none"] | Sequence[str],
    options: Collection[str],
    seed: int,
    model: str,
) -> dict[str | None, RowDialect]:
    """Return what lays out the rows of a run, by the dialect of their records.

    Args:
        columns: input columns that cbgen's own rows carry.
        options: settings that ask for more fields, of `rows.ROW_OPTIONS`.
        seed: part of the ids of batch lines.
        model: the name in batch lines whose request names no model.
    """
    run = BatchRun(seed=seed, model=model, token_ids="token_ids" in options)
    return {
        None: OutputRows(columns, options=options),
        "openai": OpenAILines(run),
        "vllm": VllmLines(run),
    }


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
        return replace(record, dialect=dialect, id=custom_id, error=None)
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
    is_batch_line = "custom_id" in row and "response" in row
    return outcome_of_line(row) if is_batch_line else outcome_of(row)


def row_error(row: Mapping[str, Any]) -> str | None:
    """Return the message of the error that an output row of any dialect carries, else None."""
    error, response = row["error"], row.get("response")
    if error is None and "index" not in row and isinstance(response, dict):  # an OpenAI line
        error = response["body"].get("error")
    while isinstance(error, dict):
        error = error.get("error", error.get("message"))
    return None if error is None else str(error)
