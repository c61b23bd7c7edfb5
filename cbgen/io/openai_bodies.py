"""The body of an answered batch line: a completion of OpenAI's API, or vLLM's form of it.

Each form has the fields that its service prints, in that order.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from cbgen.io.openai_requests import CHAT_URL
from cbgen.io.reader import Record
from cbgen.io.rows import Answer

_CREATED = 0
"""A time would make a resumed file differ from an undisturbed one."""

_NO_LOGPROB = -9999.0
"""What both services write for minus infinity, where a number must stand."""


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
        self.text = _echoed(body) + (answer.text or "")
        self.finish_reason = answer.finish_reason
        self.stop_reason = answer.stop_reason
        self.prompt_tokens = answer.prompt_tokens
        self.completion_tokens = answer.completion_tokens
        self.total_tokens = answer.prompt_tokens + answer.completion_tokens
        self.wants_ids: bool = token_ids or bool(body.get("return_token_ids"))
        self.token_ids = list(answer.token_ids or ()) if self.wants_ids else None
        self.prompt_token_ids = list(answer.prompt_token_ids or ()) if self.wants_ids else None
        self._logprobs = answer.logprobs
        self._shows_ids = bool(body.get("return_tokens_as_token_ids"))

    def logprobs(self) -> dict[str, Any] | None:
        """Return the log-probabilities of the generated tokens in the form of the endpoint."""
        given = self._logprobs
        if given is None:
            return None
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
    choice: dict[str, Any] = {"index": 0}
    if completion.is_chat:
        choice["message"] = {"role": "assistant", "content": completion.text, "refusal": None}
    else:
        choice["text"] = completion.text
    choice["logprobs"] = completion.logprobs()
    choice["finish_reason"] = completion.finish_reason
    body = {
        **completion.head,
        "choices": [choice],
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.completion_tokens,
            "total_tokens": completion.total_tokens,
        },
        "system_fingerprint": None,
    }
    if completion.wants_ids:
        choice["token_ids"] = completion.token_ids
        place = body if completion.is_chat else choice
        place["prompt_token_ids"] = completion.prompt_token_ids
    return body


def vllm_body(completion: Completion) -> dict[str, Any]:
    """Return a completion as vLLM prints it: with every field, those without a value as null."""
    choice: dict[str, Any] = {"index": 0}
    if completion.is_chat:
        nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        choice["message"] = {"role": "assistant", "content": completion.text, **nulls}
    else:
        choice["text"] = completion.text
    choice["logprobs"] = completion.logprobs()
    choice["finish_reason"] = completion.finish_reason
    choice["stop_reason"] = completion.stop_reason
    choice["token_ids"] = completion.token_ids
    if not completion.is_chat:
        choice["prompt_logprobs"] = None
        choice["prompt_token_ids"] = completion.prompt_token_ids
    choice |= {"routed_experts": None, "weight_versions": None}
    body = {
        **completion.head,
        "choices": [choice],
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
