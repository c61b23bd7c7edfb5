"""Lines of OpenAI Batch and vLLM run-batch files: what they ask for.

A line holds `custom_id`, `method`, `url` and `body`. The fields of a body are in body_fields.py,
the lines of the answer in responses.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from cbgen.errors import RowError
from cbgen.io.openai.body_fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    BodyError,
    BodyValues,
    Json,
)
from cbgen.io.prompts import (
    Prompt,
    Rendering,
    check_messages,
    check_token_ids,
    check_tools,
)
from cbgen.io.records import Record
from cbgen.values import show

logger = logging.getLogger(__name__)

BATCH_LINE_FIELDS = ("custom_id", "method", "url", "body")
"""What makes a record a line of a batch."""

CHAT_URL = "/v1/chat/completions"
COMPLETION_URL = "/v1/completions"
_FIELDS = {CHAT_URL: CHAT_FIELDS, COMPLETION_URL: COMPLETION_FIELDS}


def read_batch_request(record: Record) -> Prompt:
    """Read the request of a line.

    Raises:
        BodyError: the line or its body is wrong, or asks for something that is not supported.
    """
    columns = record.columns
    assert columns is not None, "a record without error has columns"
    method, url, body = (_member(columns, name) for name in ("method", "url", "body"))
    if method != "POST":
        raise BodyError(
            "invalid_method", f"method must be POST, got {show(method)}", param="method"
        )
    if url not in _FIELDS:
        raise BodyError(
            "invalid_url",
            f"url {show(url)} is not supported; the supported ones are {' and '.join(_FIELDS)}",
            param="url",
        )
    values = _FIELDS[url].read(body, record.dialect)
    unknown = values.unknown
    if unknown and record.dialect == "openai":
        raise BodyError(
            "unknown_parameter",
            f"{url} has no field {' and no field '.join(map(show, unknown[:3]))}; remove it",
            param=unknown[0],
        )
    for name in unknown:
        _tell_ignored(name, url)
    return _chat(body, values) if url == CHAT_URL else _completion(body, values)


def _member(columns: Mapping[str, Any], name: str) -> Json:
    value = _required(columns, name)
    kind, words = (dict, "an object") if name == "body" else (str, "a string")
    if not isinstance(value, kind):
        raise BodyError("invalid_type", f"{name} must be {words}, got {show(value)}", param=name)
    return value


@lru_cache(maxsize=256)
def _tell_ignored(name: str, url: str) -> None:
    """Warn of an unknown field, once for each of the last 256 names."""
    logger.warning("field %r is not one of %s and is ignored", name, url)


def _chat(body: Mapping[str, Any], read: BodyValues) -> Prompt:
    messages, values = _required(body, "messages", "body."), read.own
    continues = values.get("continue_final_message", False)
    if continues and values.get("add_generation_prompt"):
        raise BodyError(
            "invalid_value",
            "continue_final_message and add_generation_prompt cannot both be true",
            param="continue_final_message",
        )
    try:
        messages = check_messages(messages)
        tools = check_tools(values.get("tools"))
    except RowError as error:
        param = "tools" if error.code == "invalid_tools" else "messages"
        raise BodyError(error.code, error.message, param=param) from error
    if tools == []:
        raise BodyError("invalid_value", "tools must not be empty; leave it out", param="tools")
    rendering = Rendering(
        add_generation_prompt=values.get("add_generation_prompt", not continues),
        continue_final_message=continues,
        chat_template_kwargs=values.get("chat_template_kwargs", {}),
        variables=_variables(values),
        **_token_options(values),
    )
    return Prompt(
        messages=messages,
        tools=None if body.get("tool_choice") == "none" else tools,
        generation_config=read.settings,
        logprobs=values.get("logprobs"),
        rendering=rendering,
    )


def _completion(body: Mapping[str, Any], read: BodyValues) -> Prompt:
    prompt, values = _required(body, "prompt", "body."), read.own
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise BodyError(
                "unsupported_value",
                f"prompt holds {len(prompt)} prompts; only one a line is supported",
                param="prompt",
            )
        (prompt,) = prompt
    wants_logprobs = body.get("logprobs") is not None
    if values.get("echo"):
        _check_echo(prompt, values, wants_logprobs)
    rendering = Rendering(is_plain=True, **_token_options(values))
    is_text = isinstance(prompt, str)
    try:
        prompt_ids = None if is_text else check_token_ids("prompt", prompt)
    except RowError as error:
        message = f"prompt must be a string or a list of token ids: {error.message}"
        raise BodyError("invalid_type", message, param="prompt") from error
    return Prompt(
        text=prompt if is_text else None,
        prompt_ids=prompt_ids,
        generation_config=read.settings,
        logprobs=True if wants_logprobs else None,
        rendering=rendering,
    )


def _check_echo(prompt: object, values: Mapping[str, Any], wants_logprobs: bool) -> None:
    """Refuse what an echo would need: text for ids, log-probabilities of the prompt."""
    for is_given, beside in (
        (not isinstance(prompt, str), "a prompt of token ids"),
        (wants_logprobs, "logprobs"),
        ("truncate_prompt_tokens" in values, "truncate_prompt_tokens"),
    ):
        if is_given:
            raise BodyError(
                "unsupported_value", f"echo beside {beside} is not supported", param="echo"
            )


def _required(held: Mapping[str, Any], name: str, place: str = "") -> Json:
    value = held.get(name)
    if value is None:
        raise BodyError("missing_required_parameter", f"{place}{name} is missing", param=name)
    return value


def _token_options(values: Mapping[str, Any]) -> dict[str, Any]:
    truncate_to = values.get("truncate_prompt_tokens")
    if truncate_to == 0:
        raise BodyError(
            "invalid_value",
            "truncate_prompt_tokens must be at least 1, or -1 for what the context leaves, got 0",
            param="truncate_prompt_tokens",
        )
    return {
        "add_special_tokens": values.get("add_special_tokens"),
        "truncate_to": truncate_to,
        "truncation": values.get("truncation_side", "left"),
    }


def _variables(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what the fields that speak to the chat template alone put before it."""
    variables: dict[str, dict[str, Any]] = {}
    if "documents" in values:
        variables["documents"] = {"documents": values["documents"]}
    if "reasoning_effort" in values:
        effort = values["reasoning_effort"]
        variables["reasoning_effort"] = {
            "reasoning_effort": effort,
            "enable_thinking": effort != "none",
        }
    return variables
