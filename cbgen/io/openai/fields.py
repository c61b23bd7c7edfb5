"""The fields of request bodies: which are honoured, at which values others ask for nothing.

The fields are those of OpenAI's API and of vLLM's. A field that is null counts as absent. What is
honoured is checked for kind and range, so that nothing behind this module can stumble over it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from cbgen.errors import RowError
from cbgen.io.encode import encode_value

Json: TypeAlias = Any
"""A value as JSON has it."""

Kind = Literal["number", "integer", "boolean", "string", "object", "integers", "objects", "any"]

_KIND_WORDS: dict[Kind, str] = {
    "number": "a number",
    "integer": "an integer",
    "boolean": "true or false",
    "string": "a string",
    "object": "an object",
    "integers": "a list of integers",
    "objects": "a list of objects",
}


class BodyError(RowError):
    """A request that is refused for what its line or body says.

    Attributes:
        param: the field that is wrong; None where it is none of them alone.
    """

    def __init__(self, code: str, message: str, *, param: str | None) -> None:
        super().__init__(code, message, type="invalid_request")
        self.param = param


class FieldRule(Protocol):
    """What becomes of one field."""

    def check(self, name: str, value: Json) -> Json:
        """Return the value to honour, None where there is none.

        Raises:
            BodyError: the value is wrong or not supported.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Honoured:
    """A field that does what it says."""

    kind: Kind
    setting: str | None = None
    """The field of a generation config that takes the value."""
    at_least: float = -math.inf
    at_most: float = math.inf
    choices: tuple[str, ...] = ()

    def check(self, name: str, value: Json) -> Json:
        """Return the value in its own type."""
        typed = _typed(name, self.kind, value)
        if self.choices and typed not in self.choices:
            raise _wrong(name, f"must be one of {', '.join(self.choices)}", value)
        for number in typed if self.kind == "integers" else (typed,):
            if isinstance(number, int | float) and not self.at_least <= number <= self.at_most:
                raise _wrong(name, f"must be {self._range()}", value)
        return typed

    def _range(self) -> str:
        limits = (("at least", self.at_least), ("at most", self.at_most))
        return " and ".join(f"{words} {limit}" for words, limit in limits if math.isfinite(limit))


@dataclass(frozen=True, slots=True)
class Neutral:
    """A field that is accepted at values that ask for nothing, and refused at others."""

    values: tuple[Any, ...] = ()

    def check(self, name: str, value: Json) -> None:
        """Accept a value that asks for nothing."""
        if any(value == item and type(value) is not bool for item in self.values):
            return
        if type(value) is bool and any(value is item for item in self.values):
            return
        accepted = " or ".join(map(show, (*self.values, None)))
        raise BodyError(
            "unsupported_value" if self.values else "unsupported_parameter",
            f"{name} = {show(value)} is not supported; remove it (accepted: {accepted})",
            param=name,
        )


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A field about the service around a model: any value is accepted."""

    def check(self, name: str, value: Json) -> None:
        """Accept anything."""


def _typed(name: str, kind: Kind, value: Json) -> Json:
    if kind == "any":
        return value
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)  # JSON has one kind of number
    if not _is_kind(kind, value):
        raise BodyError(
            "invalid_type", f"{name} must be {_KIND_WORDS[kind]}, got {show(value)}", param=name
        )
    return value


def _is_kind(kind: Kind, value: Json) -> bool:
    if kind == "number":
        return type(value) is not bool and isinstance(value, int | float) and abs(value) < math.inf
    if kind == "integers":
        return isinstance(value, list) and all(type(item) is int for item in value)
    if kind == "objects":
        return isinstance(value, list) and all(isinstance(item, dict) for item in value)
    types = {"integer": int, "boolean": bool, "string": str, "object": dict}
    return type(value) is types[kind]


def _wrong(name: str, rule: str, value: object) -> BodyError:
    return BodyError("invalid_value", f"{name} {rule}, got {show(value)}", param=name)


def show(value: Json) -> str:
    """Return a value as JSON for a message, cut to 60 characters."""
    text = encode_value(value)
    return text if len(text) <= 60 else text[:57] + "..."


_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_COMMON: dict[str, FieldRule] = {
    "model": Honoured(kind="string"),
    "temperature": Honoured(kind="number", setting="temperature", at_least=0, at_most=1e6),
    "top_p": Honoured(kind="number", setting="top_p", at_least=0, at_most=1),
    "top_k": Honoured(kind="integer", setting="top_k", at_least=-1),
    "min_p": Honoured(kind="number", setting="min_p", at_least=0, at_most=1),
    "seed": Honoured(kind="integer", setting="seed", at_least=-(2**63), at_most=2**63 - 1),
    "max_tokens": Honoured(kind="integer", setting="max_new_tokens", at_least=1),
    "n": Honoured(kind="integer", setting="num_return_sequences", at_least=1, at_most=128),
    "stop_token_ids": Honoured(kind="integers", setting="stop_token_ids", at_least=0),
    "ignore_eos": Honoured(kind="boolean", setting="ignore_eos"),
    "skip_special_tokens": Honoured(kind="boolean", setting="skip_special_tokens"),
    "add_special_tokens": Honoured(kind="boolean"),
    "truncate_prompt_tokens": Honoured(kind="integer", at_least=-1),
    "truncation_side": Honoured(kind="string", choices=("left", "right")),
    "return_token_ids": Honoured(kind="boolean"),
    "return_tokens_as_token_ids": Honoured(kind="boolean"),
    "request_id": Honoured(kind="string"),
    "stream": Neutral((False,)),
    "stream_options": Neutral(({},)),
    "stop": Neutral(([],)),
    "include_stop_str_in_output": Neutral((False,)),
    "frequency_penalty": Neutral((0,)),
    "presence_penalty": Neutral((0,)),
    "repetition_penalty": Neutral((1,)),
    "length_penalty": Neutral((1,)),
    "logit_bias": Neutral(({},)),
    "use_beam_search": Neutral((False,)),
    "watermarking": Neutral((False,)),
    "min_tokens": Neutral((0,)),
    "spaces_between_special_tokens": Neutral((True,)),
    "prompt_logprobs": Neutral(),
    "logprob_token_ids": Neutral(),
    "allowed_token_ids": Neutral(),
    "bad_words": Neutral(([],)),
    "response_format": Neutral(({"type": "text"},)),
    "structured_outputs": Neutral(),
    "thinking_token_budget": Neutral((-1,)),
    "repetition_detection": Neutral(),
    "priority": Neutral((0,)),
    "routed_experts_prompt_start": Neutral((0,)),
    "kv_transfer_params": Neutral(({},)),
    "ec_transfer_params": Neutral(({},)),
    "vllm_xargs": Neutral(({},)),
    "user": NoEffect(),
    "metadata": NoEffect(),
    "safety_identifier": NoEffect(),
    "service_tier": NoEffect(),
    "store": NoEffect(),
    "prompt_cache_key": NoEffect(),
    "prompt_cache_options": NoEffect(),
    "prompt_cache_retention": NoEffect(),
    "cache_salt": NoEffect(),
    "session_id": NoEffect(),
    "stream_interval": NoEffect(),
    "return_token_offsets": NoEffect(),
    "return_mm_kwargs": NoEffect(),
}

CHAT_FIELDS: dict[str, FieldRule] = {
    **_COMMON,
    "messages": Honoured(kind="any"),
    "max_completion_tokens": Honoured(kind="integer", setting="max_new_tokens", at_least=1),
    "logprobs": Honoured(kind="boolean"),
    "top_logprobs": Neutral((0,)),
    "tools": Honoured(kind="any"),
    "tool_choice": Neutral(("none", "auto")),
    "parallel_tool_calls": Neutral((True,)),
    "functions": Neutral(([],)),
    "function_call": Neutral(("none",)),
    "add_generation_prompt": Honoured(kind="boolean"),
    "continue_final_message": Honoured(kind="boolean"),
    # A template is a program without a bound on its time: one line's could stall all others.
    "chat_template": Neutral(),
    "chat_template_kwargs": Honoured(kind="object"),
    "documents": Honoured(kind="objects"),
    "reasoning_effort": Honoured(kind="string", choices=_EFFORTS),
    "include_reasoning": Neutral((True,)),
    "return_prompt_text": Neutral((False,)),
    "echo": Neutral((False,)),
    "modalities": Neutral((["text"],)),
    "verbosity": Neutral(("medium",)),
    "audio": Neutral(),
    "moderation": Neutral(),
    "prediction": Neutral(),
    "web_search_options": Neutral(),
    "media_io_kwargs": Neutral(({},)),
    "mm_processor_kwargs": Neutral(({},)),
}
"""Fields of `/v1/chat/completions`."""

COMPLETION_FIELDS: dict[str, FieldRule] = {
    **_COMMON,
    "prompt": Honoured(kind="any"),
    "logprobs": Neutral((0,)),
    "echo": Honoured(kind="boolean"),
    "best_of": Neutral((1,)),
    "suffix": Neutral(("",)),
    "prompt_embeds": Neutral(),
}
"""Fields of `/v1/completions`; `logprobs: 0` asks for those of the generated tokens."""


def read_fields(
    fields: Mapping[str, FieldRule], body: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a body that are to be honoured, and the names of unknown fields.

    Raises:
        BodyError: a field is wrong or not supported.
    """
    values: dict[str, Any] = {}
    unknown = []
    for name, given in body.items():
        rule = fields.get(name)
        if rule is None:
            unknown.append(name)
        elif given is not None:
            checked = rule.check(name, given)
            if checked is not None:
                values[name] = checked
    return values, unknown


def settings_of(fields: Mapping[str, FieldRule], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of the values belongs into a generation config, under the names used there."""
    return {  # of two fields for one setting the later one in the table counts
        rule.setting: values[name]
        for name, rule in fields.items()
        if isinstance(rule, Honoured) and rule.setting is not None and name in values
    }
