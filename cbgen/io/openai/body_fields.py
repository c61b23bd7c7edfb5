"""The fields of request bodies: those for settings of a request, and those of the bodies alone.

The fields are those of OpenAI's API and of vLLM's. A field that is null counts as absent. What a
setting may be stands in `cbgen.generation.fields`, with its name in bodies; the others stand here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from cbgen.errors import RowError
from cbgen.generation.check import FieldError, check_field
from cbgen.generation.fields import (
    GENERATION_FIELDS,
    Alias,
    Endpoint,
    Field,
    Support,
    honoured,
    neutral,
    no_effect,
    refused,
)
from cbgen.values import Range, describe, show

Json: TypeAlias = Any
"""A value as JSON has it."""

_Objects = list[dict[str, Any]]
_JSON_WORDS: dict[Any, str] = {
    float: "a number",
    int: "an integer",
    bool: "true or false",
    str: "a string",
    dict[str, Any]: "an object",
    list[int]: "a list of integers",
    _Objects: "a list of objects",
    str | list[str]: "a string or a list of strings",
}


class BodyError(RowError):
    """A request that is refused for what its line or body says.

    Attributes:
        param: the field that is wrong; None if no single field is.
    """

    def __init__(self, code: str, message: str, *, param: str | None) -> None:
        super().__init__(code, message, type="invalid_request")
        self.param = param


_COMMON = (
    honoured("model", type=str),
    honoured("add_special_tokens", type=bool),
    honoured("truncate_prompt_tokens", type=int, range=Range(at_least=-1)),
    honoured("truncation_side", type=Literal["left", "right"]),
    honoured("return_token_ids", type=bool),
    honoured("return_tokens_as_token_ids", type=bool),
    honoured("request_id", type=str),
    neutral("stream", False),
    neutral("stream_options", {}),
    neutral("use_beam_search", False),
    neutral("watermarking", False),
    neutral("spaces_between_special_tokens", True),
    refused("prompt_logprobs"),
    refused("logprob_token_ids"),
    refused("allowed_token_ids"),
    neutral("bad_words", []),
    neutral("response_format", {"type": "text"}),
    refused("structured_outputs"),
    neutral("thinking_token_budget", -1),
    refused("repetition_detection"),
    neutral("priority", 0),
    neutral("routed_experts_prompt_start", 0),
    neutral("kv_transfer_params", {}),
    neutral("ec_transfer_params", {}),
    neutral("vllm_xargs", {}),
    no_effect("user"),
    no_effect("metadata"),
    no_effect("safety_identifier"),
    no_effect("service_tier"),
    no_effect("store"),
    no_effect("prompt_cache_key"),
    no_effect("prompt_cache_options"),
    no_effect("prompt_cache_retention"),
    no_effect("cache_salt"),
    no_effect("session_id"),
    no_effect("stream_interval"),
    no_effect("return_token_offsets"),
    no_effect("return_mm_kwargs"),
)

_CHAT = (
    honoured("messages"),
    honoured("logprobs", type=bool),
    neutral("top_logprobs", 0),
    honoured("tools"),
    neutral("tool_choice", "none", "auto"),
    neutral("parallel_tool_calls", True),
    neutral("functions", []),
    neutral("function_call", "none"),
    honoured("add_generation_prompt", type=bool),
    honoured("continue_final_message", type=bool),
    # A template is a program without a bound on its time: one line's could stall all others.
    refused("chat_template"),
    honoured("chat_template_kwargs", type=dict[str, Any]),
    honoured("documents", type=_Objects),
    honoured(
        "reasoning_effort", type=Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
    ),
    neutral("include_reasoning", True),
    neutral("return_prompt_text", False),
    neutral("echo", False),
    neutral("modalities", ["text"]),
    neutral("verbosity", "medium"),
    refused("audio"),
    refused("moderation"),
    refused("prediction"),
    refused("web_search_options"),
    neutral("media_io_kwargs", {}),
    neutral("mm_processor_kwargs", {}),
)

_COMPLETIONS = (
    honoured("prompt"),
    # 0 asks for the log-probabilities of the generated tokens, which requests.py honours.
    neutral("logprobs", 0),
    honoured("echo", type=bool),
    neutral("best_of", 1),
    neutral("suffix", ""),
    refused("prompt_embeds"),
)


@dataclass(frozen=True, slots=True)
class BodyValues:
    """What a body asks for."""

    own: dict[str, Any]
    """Values of the honoured fields that are no settings."""
    settings: dict[str, Any]
    """The fields of a generation config."""
    unknown: list[str]
    """Names that no field has."""


class BodyFields:
    """The fields that the bodies of an endpoint may have.

    Attributes:
        rules: every field under its name in bodies.
    """

    def __init__(self, endpoint: Endpoint, own: tuple[Field, ...]) -> None:
        self._settings: dict[str, tuple[str, Alias]] = {}
        self.rules = {field.name: field for field in (*_COMMON, *own)}
        for field in GENERATION_FIELDS.values():
            for alias in field.aliases:
                if endpoint in alias.endpoints:
                    self._settings[alias.name] = field.name, alias
                    self.rules[alias.name] = replace(
                        field, name=alias.name, range=alias.range or field.range
                    )

    def read(self, body: Mapping[str, Any], dialect: str | None) -> BodyValues:
        """Check a body, and return what of it is to be honoured.

        Raises:
            BodyError: a field is wrong or not supported.
        """
        values, unknown = {}, []
        for name, given in body.items():
            rule = self.rules.get(name)
            if rule is None:
                unknown.append(name)
            elif given is not None:
                value = _checked(rule, given)
                if rule.support is Support.HONOURED:
                    values[name] = value
        settings = {}
        for name, (setting, alias) in self._settings.items():
            if name in values:
                value = values.pop(name)
                if dialect == "openai":
                    _check_length(alias, value)
                settings[setting] = value if alias.convert is None else alias.convert(value)
        return BodyValues(values, settings, unknown)


CHAT_FIELDS = BodyFields("chat", _CHAT)
"""Fields of `/v1/chat/completions`."""
COMPLETION_FIELDS = BodyFields("completions", _COMPLETIONS)
"""Fields of `/v1/completions`."""


def _checked(rule: Field, value: Json) -> Json:
    if rule.type is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON has one kind of number
    try:
        return check_field(rule, value)
    except FieldError as error:
        code, message = error.code, str(error)
        if code == "invalid_type":
            words = _JSON_WORDS.get(rule.type)
            code = "invalid_value" if words is None else code  # one of several choices
            message = f"{rule.name} must be {words or describe(rule.type)}, got {show(value)}"
        raise BodyError(code, message, param=rule.name) from error


def _check_length(alias: Alias, value: Json) -> None:
    most = alias.most_items
    if most is not None and isinstance(value, list) and len(value) > most:
        raise BodyError(
            "invalid_value",
            f"{alias.name} holds {len(value)} values, and OpenAI's API takes at most {most}; give "
            "fewer, or read the lines with --format vllm",
            param=alias.name,
        )
