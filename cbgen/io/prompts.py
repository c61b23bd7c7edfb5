"""What a record asks for: its one prompt, checked for shape.

Checks what can be seen in the row alone. Chat templates, tokens, the vocabulary and the meaning of
`generation_config` are the job's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from cbgen.errors import RowError
from cbgen.io.reader import Record, shorten
from cbgen.io.template import Template

_FORMS = ("prompt", "messages", "prompt_token_ids", "input_ids")
_BATCH_LINE_FIELDS = ("custom_id", "url", "body")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt of one row; `kind` says which of text, messages and token_ids is set."""

    kind: Literal["text", "messages", "token_ids"]
    text: str | None = None
    """May be empty: a plain prompt without tokens is found where it is tokenized."""
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    generation_config: dict[str, Any] | None = None
    """The row's own fields as given, unchecked."""


def parse_prompt(record: Record, *, template: Template | None) -> Prompt:
    """Read the prompt of a record.

    With a template the row's columns are only columns: the prompt is the filled template. A field
    that is null counts as absent.

    Raises:
        RowError: the record has an error already, holds none or several of the forms, or its form
            is wrong.
    """
    if record.error is not None:
        raise record.error
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
            raise _invalid("prompt", "must be a string (token ids go into prompt_token_ids)", value)
        return Prompt(kind="text", text=value, generation_config=generation_config)
    if form == "messages":
        return Prompt(
            kind="messages",
            messages=_messages(value),
            tools=_tools(columns.get("tools")),
            generation_config=generation_config,
        )
    return Prompt(
        kind="token_ids", token_ids=_token_ids(form, value), generation_config=generation_config
    )


def _form(columns: dict[str, Any]) -> str:
    forms = [name for name in _FORMS if columns.get(name) is not None]
    if len(forms) == 1:
        return forms[0]
    if forms:
        raise RowError(
            "ambiguous_prompt", f"the row holds {' and '.join(forms)}; it must hold one of them"
        )
    if all(name in columns for name in _BATCH_LINE_FIELDS):
        raise RowError(
            "unsupported",
            "an OpenAI Batch line (custom_id, url, body) is not read yet; give prompt or messages",
        )
    present = ", ".join(columns) or "none"
    raise RowError(
        "no_prompt",
        f"the row holds no prompt: give it one of {', '.join(_FORMS)}, or set prompt.template; "
        f"its columns: {present}",
    )


def _generation_config(columns: dict[str, Any]) -> dict[str, Any] | None:
    value = columns.get("generation_config")
    if value is not None and not isinstance(value, dict):
        raise _invalid("generation_config", "must be an object", value)
    return value


def _messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise _invalid("messages", "must be a list of at least one message", value)
    for number, message in enumerate(value):
        place = f"messages[{number}]"
        if not isinstance(message, dict):
            raise _invalid(place, "must be an object with role and content", message)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise _invalid(f"{place}.role", "must be a string such as user", role)
        _check_content(f"{place}.content", message)
    return value


def _check_content(place: str, message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        return
    if content is None and message["role"] == "assistant":
        return  # an answer that only calls tools
    if not isinstance(content, list):
        raise _invalid(
            place, "must be a string or a list of parts (only an assistant's may be null)", content
        )
    for number, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise _invalid(f"{place}[{number}]", "must be an object with a type", part)
        if part["type"] != "text":
            raise RowError(
                "unsupported", f"{place}[{number}]: only text is supported, got {part['type']!r}"
            )
        if not isinstance(part.get("text"), str):
            raise _invalid(f"{place}[{number}].text", "must be a string", part.get("text"))


def _tools(value: object) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise _invalid("tools", "must be a list of objects", value)
    return value


def _token_ids(form: str, value: object) -> list[int]:
    if not isinstance(value, list) or not value:
        raise _invalid(form, "must be a list of at least one token id", value)
    if set(map(type, value)) != {int}:  # a bool is no token id
        wrong = next(item for item in value if type(item) is not int)
        raise _invalid(form, "must hold integers only", wrong)
    if min(value) < 0:
        raise _invalid(form, "must hold no negative ids", min(value))
    return value


def _invalid(field: str, rule: str, value: object) -> RowError:
    code = "invalid_" + field.partition("[")[0]
    return RowError(code, f"{field} {rule}, got {shorten(value)}")
