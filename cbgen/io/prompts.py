"""What a prompt is, and whether messages, tools and token ids have the shape that they must have.

Knows no row: which field holds what is in dialects.py and openai/requests.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cbgen.errors import RowError
from cbgen.values import show


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """How one prompt becomes tokens where its row says so itself; None = as the recipe says."""

    is_plain: bool = False
    """Text is never sent through the chat template."""
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By the field that asked for them: variables of which the template must know at least one."""
    truncate_to: int | None = None
    """Most tokens of the prompt, the others are cut off; -1 = what the context leaves."""
    truncation: Literal["left", "right"] = "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt of one row: one of text, messages and prompt_ids is set."""

    text: str | None = None
    """May be empty: a plain prompt without tokens is found where it is tokenized."""
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    prompt_ids: list[int] | None = None
    generation_config: dict[str, Any] | None = None
    """The row's own fields as given, unchecked."""
    logprobs: bool | None = None
    """Whether the row wants log-probabilities; None = as the recipe says."""
    rendering: Rendering | None = None


def check_messages(value: object) -> list[dict[str, Any]]:
    """Return the messages of a conversation.

    Raises:
        RowError: they have not the shape of messages, or hold more than text.
    """
    if not isinstance(value, list) or not value:
        raise invalid("messages", "must be a list of at least one message", value)
    for number, message in enumerate(value):
        place = f"messages[{number}]"
        if not isinstance(message, dict):
            raise invalid(place, "must be an object with role and content", message)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise invalid(f"{place}.role", "must be a string such as user", role)
        _check_content(f"{place}.content", message)
    return value


def _check_content(place: str, message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        return
    if content is None and message["role"] == "assistant":
        return  # an answer that only calls tools
    if not isinstance(content, list):
        raise invalid(
            place, "must be a string or a list of parts (only an assistant's may be null)", content
        )
    for number, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise invalid(f"{place}[{number}]", "must be an object with a type", part)
        if part["type"] != "text":
            raise RowError(
                "unsupported", f"{place}[{number}]: only text is supported, got {part['type']!r}"
            )
        if not isinstance(part.get("text"), str):
            raise invalid(f"{place}[{number}].text", "must be a string", part.get("text"))


def check_tools(value: object) -> list[dict[str, Any]] | None:
    """Return the tools of a conversation; None if there are none.

    Raises:
        RowError: they are no list of objects.
    """
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise invalid("tools", "must be a list of objects", value)
    return value


def check_token_ids(field: str, value: object) -> list[int]:
    """Return the token ids that `field` holds.

    Raises:
        RowError: they are no list of at least one integer, none negative.
    """
    if not isinstance(value, list) or not value:
        raise invalid(field, "must be a list of at least one token id", value)
    if set(map(type, value)) != {int}:  # a bool is no token id
        wrong = next(item for item in value if type(item) is not int)
        raise invalid(field, "must hold integers only", wrong)
    if min(value) < 0:
        raise invalid(field, "must hold no negative ids", min(value))
    return value


def invalid(field: str, rule: str, value: object) -> RowError:
    """Return the error of a field that breaks a rule; its code is `invalid_` and the field."""
    code = "invalid_" + field.partition("[")[0]
    return RowError(code, f"{field} {rule}, got {show(value)}")
