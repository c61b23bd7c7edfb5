"""The body of an answered batch line: a completion of OpenAI's API, or vLLM's form of it.

Each form has the fields that its service prints, in that order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from cbgen.io.openai.requests import CHAT_URL
from cbgen.io.reader import Record
from cbgen.io.rows import Answer, Choice

_CREATED = 0
"""A time would make a resumed file differ from an undisturbed one."""

_NO_LOGPROB = -9999.0
"""What both services write for minus infinity, where a number must stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionChoice:
    """What a sample says in either form."""

    text: str
    finish_reason: str
    stop_reason: str | int | None
    logprobs: dict[str, Any] | None
    """In the form of the endpoint."""
    token_ids: list[int] | None


class Completion:
    """What an answer says in either form.

    Args:
        record: the line that is answered.
        answer: what was generated, with its token ids.
        digest: hexadecimal digits for the id.
        model: name of the model, if the body has none.
        token_ids: write token ids even if the body does not ask for them.
    """

    def __init__(
        self, record: Record, answer: Answer, *, digest: str, model: str, token_ids: bool
    ) -> None:
        columns = record.columns
        assert columns is not None, "an answered record has columns"
        body: Mapping[str, Any] = columns["body"]
        self.is_chat: bool = columns["url"] == CHAT_URL
        self.head = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{body.get('request_id') or digest}",
            "object": "chat.completion" if self.is_chat else "text_completion",
            "created": _CREATED,
            "model": body.get("model") or model,
        }
        self.prompt_tokens = answer.prompt_tokens
        self.completion_tokens = answer.completion_tokens
        self.total_tokens = answer.prompt_tokens + answer.completion_tokens
        self.wants_ids: bool = token_ids or bool(body.get("return_token_ids"))
        self.prompt_token_ids = list(answer.prompt_token_ids or ()) if self.wants_ids else None
        self._echo = _echoed(body)
        self._shows_ids = bool(body.get("return_tokens_as_token_ids"))
        self.choices = [self._choice(choice) for choice in answer.choices]

    def _choice(self, choice: Choice) -> CompletionChoice:
        return CompletionChoice(
            text=self._echo + (choice.text or ""),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            logprobs=None if choice.logprobs is None else self._logprobs(choice.logprobs),
            token_ids=list(choice.token_ids or ()) if self.wants_ids else None,
        )

    def _logprobs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        tokens: list[str] = given["tokens"]
        if self._shows_ids:
            tokens = [f"token_id:{token_id}" for token_id in given["token_ids"]]
        values = [_NO_LOGPROB if value is None else value for value in given["logprobs"]]
        if self.is_chat:
            content = [
                {
                    "token": token,
                    "logprob": value,
                    "bytes": list(token.encode("utf-8", "replace")),
                    "top_logprobs": [],
                }
                for token, value in zip(tokens, values, strict=True)
            ]
            return {"content": content}
        ends = accumulate(map(len, given["tokens"]), initial=0)
        return {
            "text_offset": [start for start, _ in zip(ends, tokens, strict=False)],
            "token_logprobs": values,
            "tokens": tokens,
            "top_logprobs": [{token: value} for token, value in zip(tokens, values, strict=True)],
        }


def _echoed(body: Mapping[str, Any]) -> str:
    if not body.get("echo"):
        return ""
    prompt: str | list[str] = body["prompt"]
    return prompt if isinstance(prompt, str) else prompt[0]


def openai_body(completion: Completion) -> dict[str, Any]:
    """Return a completion as OpenAI prints it; token ids, if wanted, stand where vLLM has them."""
    body = {
        **completion.head,
        "choices": [
            _openai_choice(completion, index, choice)
            for index, choice in enumerate(completion.choices)
        ],
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.completion_tokens,
            "total_tokens": completion.total_tokens,
        },
        "system_fingerprint": None,
    }
    if completion.wants_ids and completion.is_chat:
        body["prompt_token_ids"] = completion.prompt_token_ids
    return body


def _openai_choice(completion: Completion, index: int, held: CompletionChoice) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index}
    if completion.is_chat:
        choice["message"] = {"role": "assistant", "content": held.text, "refusal": None}
    else:
        choice["text"] = held.text
    choice["logprobs"] = held.logprobs
    choice["finish_reason"] = held.finish_reason
    if completion.wants_ids:
        choice["token_ids"] = held.token_ids
        if not completion.is_chat:
            choice["prompt_token_ids"] = completion.prompt_token_ids
    return choice


def vllm_body(completion: Completion) -> dict[str, Any]:
    """Return a completion as vLLM prints it: with every field, those without a value as null."""
    body = {
        **completion.head,
        "choices": [
            _vllm_choice(completion, index, choice)
            for index, choice in enumerate(completion.choices)
        ],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "total_tokens": completion.total_tokens,
            "completion_tokens": completion.completion_tokens,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
    }
    if completion.is_chat:
        body["prompt_logprobs"] = None
        body["prompt_token_ids"] = completion.prompt_token_ids
        body["prompt_text"] = None
    return body | dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "metrics"))


def _vllm_choice(completion: Completion, index: int, held: CompletionChoice) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index}
    if completion.is_chat:
        nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        choice["message"] = {"role": "assistant", "content": held.text, **nulls}
    else:
        choice["text"] = held.text
    choice["logprobs"] = held.logprobs
    choice["finish_reason"] = held.finish_reason
    choice["stop_reason"] = held.stop_reason
    choice["token_ids"] = held.token_ids
    if not completion.is_chat:
        choice["prompt_logprobs"] = None
        choice["prompt_token_ids"] = completion.prompt_token_ids
    return choice | {"routed_experts": None, "weight_versions": None}
