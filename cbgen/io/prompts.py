"""What a record asks for: its one prompt, checked for shape.

Checks what can be seen in the row alone. Chat templates, tokens, the vocabulary and the meaning of
`generation_config` are the job's.
"""

from __future__ import annotations

from typing import Any

from cbgen.errors import RowError
from cbgen.io.openai.requests import BATCH_LINE_FIELDS, read_batch_request
from cbgen.io.prompt_shapes import Prompt, check_messages, check_token_ids, check_tools, invalid
from cbgen.io.reader import Record
from cbgen.io.template import Template

_FORMS = ("prompt", "messages", "prompt_token_ids", "input_ids")


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
        text = template.render(columns)
        return Prompt(kind="text", text=text, generation_config=generation_config)
    form = _form(columns)
    value = columns[form]
    if form == "prompt":
        if not isinstance(value, str):
            raise invalid("prompt", "must be a string (token ids go into prompt_token_ids)", value)
        return Prompt(kind="text", text=value, generation_config=generation_config)
    if form == "messages":
        return Prompt(
            kind="messages",
            messages=check_messages(value),
            tools=check_tools(columns.get("tools")),
            generation_config=generation_config,
        )
    return Prompt(
        kind="token_ids",
        token_ids=check_token_ids(form, value),
        generation_config=generation_config,
    )


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
