"""Answers and failures of batch lines, as OpenAI Batch and vLLM run-batch write them.

A body has the fields that its service prints, in that order. Everything in a line is a function of
run seed, index and request: ids are hashes and `created` is 0, so that a resumed file equals an
undisturbed one. The index of a line stands in its `id`, as a hexadecimal number between prefix and
hash.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from cbgen.errors import RowError
from cbgen.io.openai.body_fields import BodyError, Json
from cbgen.io.openai.requests import CHAT_URL
from cbgen.io.records import Record
from cbgen.io.rows import Answer, Sample

_LINE_ID = re.compile(r"(?:batch_req_|vllm-)([0-9a-f]+)[_-][0-9a-f]{16}")
"""What the `id` of a line looks like; the group is the record's index."""

CANCELLED = "batch_cancelled"
"""Error code of a request that the end of the run cut short."""

_LINE_CODES = {"invalid_json": "invalid_json_line", "duplicate_id": "duplicate_custom_id"}
_CONTEXT_CODES = ("prompt_too_long", "prompt_exceeds_cache")
_PROMPT_CODES = (
    *_CONTEXT_CODES, "empty_prompt", "token_out_of_vocabulary", "chat_template_failed",
    "tokenization_failed", "no_tokenizer",
)  # fmt: skip
_PLAIN_MESSAGES = ("url", "stream")
"""Fields whose refusal vLLM writes as a string."""

_CREATED = 0
"""A time would make a resumed file differ from an undisturbed one."""

_NO_LOGPROB = -9999.0
"""What both services write for minus infinity, where a number must stand."""


_OPENAI_FIELDS = {
    "message": ("role", "content", "refusal"),
    "choice": (
        "index", "message", "text", "logprobs", "finish_reason", "token_ids", "prompt_token_ids",
    ),
    "usage": ("prompt_tokens", "completion_tokens", "total_tokens"),
    "body": (
        "id", "object", "created", "model", "choices", "usage", "system_fingerprint",
        "prompt_token_ids",
    ),
}  # fmt: skip
"""What OpenAI prints of the fields that vLLM prints, in its own order."""
_TOKEN_IDS = ("token_ids", "prompt_token_ids")
"""Fields that OpenAI has not: its bodies hold them where they are wanted, and no null."""

_VLLM_NULLS = {
    "message": ("annotations", "audio", "function_call", "reasoning"),
    "choice": ("routed_experts", "weight_versions"),
    "usage": ("prompt_tokens_details", "completion_tokens_details"),
    "body": ("kv_transfer_params", "ec_transfer_params", "metrics"),
}
"""Fields without a value, which vLLM prints at the end of an object."""


class BatchLines:
    """Lays out the answers and failures of batch lines, each in the dialect of its record.

    For OpenAI a refusal is a response like another, and `error` is what never ran. For vLLM
    whatever is no answer has an `error` and a response without body.

    Args:
        seed: part of every id.
        model: for a body that names no model.
        token_ids: write token ids even where a body does not ask for them.
    """

    def __init__(self, *, seed: int, model: str, token_ids: bool) -> None:
        self._seed = seed
        self._model = model
        self._token_ids = token_ids

    def digest(self, record: Record) -> str:
        """Return the 32 hexadecimal digits that the ids of a record's line are made of."""
        text = f"{self._seed}\0{record.index}\0{record.id}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, digest_size=16).hexdigest()

    def answer(self, record: Record, answer: Answer) -> dict[str, Any]:
        """Return the line of a request that was answered."""
        return self._line(record, status=200, body=self._body(record, answer))

    def failure(self, record: Record, error: RowError) -> dict[str, Any]:
        """Return the line of a request that was refused, that failed, or that never ran."""
        is_vllm = record.dialect == "vllm"
        never_ran = record.error is not None or error.code == CANCELLED
        if never_ran and not is_vllm:
            code = _LINE_CODES.get(error.code, error.code)
            return self._line(record, error={"code": code, "message": error.message})
        is_engines = error.type == "engine_error"
        status = 500 if is_engines else 400
        param = _param(record, error)
        if is_vllm:
            kind = "InternalServerError" if is_engines else "BadRequestError"
            details = {"message": error.message, "type": kind, "param": param, "code": status}
            is_plain = param in _PLAIN_MESSAGES
            problem = error.message if is_plain else {"error": details}
            return self._line(record, status=status, error=problem)
        kind = "server_error" if is_engines else "invalid_request_error"
        code = "context_length_exceeded" if error.code in _CONTEXT_CODES else error.code
        details = {"message": error.message, "type": kind, "param": param, "code": code}
        return self._line(record, status=status, body={"error": details})

    def _line(
        self,
        record: Record,
        *,
        status: int | None = None,
        body: dict[str, Any] | None = None,
        error: object = None,
    ) -> dict[str, Any]:
        """Return a line; without a status it has no response."""
        digest = self.digest(record)
        line_id, request_id = f"batch_req_{record.index:x}_{digest[:16]}", f"req_{digest}"
        if record.dialect == "vllm":
            line_id, request_id = f"vllm-{record.index:x}-{digest[:16]}", f"vllm-batch-{digest}"
        response = {"status_code": status, "request_id": request_id, "body": body}
        return {
            "id": line_id,
            "custom_id": _custom_id(record),
            "response": None if status is None else response,
            "error": error,
        }

    def _body(self, record: Record, answer: Answer) -> dict[str, Any]:
        columns = record.columns
        assert columns is not None, "an answered record has columns"
        request: Mapping[str, Any] = columns["body"]
        is_chat = columns["url"] == CHAT_URL
        wants_ids = self._token_ids or bool(request.get("return_token_ids"))
        of_prompt = {
            "prompt_logprobs": None,
            "prompt_token_ids": list(answer.prompt_ids) if wants_ids else None,
        }

        def choice(index: int, sample: Sample) -> dict[str, Any]:
            text = _echoed(request) + (sample.text or "")
            message = {"role": "assistant", "content": text, "refusal": None}
            fields = {
                "index": index,
                **(
                    {"message": _printed(record, "message", message)} if is_chat else {"text": text}
                ),
                "logprobs": _logprobs(sample, request, is_chat=is_chat),
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
                "token_ids": list(sample.generated_tokens) if wants_ids else None,
                **({} if is_chat else of_prompt),
            }
            return _printed(record, "choice", fields)

        num_prompt, num_completion = len(answer.prompt_ids), answer.completion_tokens
        usage = {
            "prompt_tokens": num_prompt,
            "total_tokens": num_prompt + num_completion,
            "completion_tokens": num_completion,
        }
        fields = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-"
            f"{request.get('request_id') or self.digest(record)}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": _CREATED,
            "model": request.get("model") or self._model,
            "choices": [choice(index, sample) for index, sample in enumerate(answer.samples)],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": _printed(record, "usage", usage),
            **({**of_prompt, "prompt_text": None} if is_chat else {}),
        }
        return _printed(record, "body", fields)


def _printed(record: Record, part: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an object as the service of a record's dialect prints them."""
    if record.dialect == "vllm":
        return {**fields, **dict.fromkeys(_VLLM_NULLS[part])}
    names = [name for name in _OPENAI_FIELDS[part] if name in fields]
    return {n: fields[n] for n in names if fields[n] is not None or n not in _TOKEN_IDS}


def _logprobs(
    sample: Sample, request: Mapping[str, Any], *, is_chat: bool
) -> dict[str, Any] | None:
    """Return the log-probabilities of a sample in the form of the endpoint."""
    given = sample.logprobs
    if given is None:
        return None
    tokens: list[str] = given["tokens"]
    if request.get("return_tokens_as_token_ids"):
        tokens = [f"token_id:{token_id}" for token_id in given["token_ids"]]
    values = [_NO_LOGPROB if value is None else value for value in given["logprobs"]]
    if is_chat:
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
    ends = list(accumulate(map(len, given["tokens"]), initial=0))
    return {
        "text_offset": ends[:-1],
        "token_logprobs": values,
        "tokens": tokens,
        "top_logprobs": [{token: value} for token, value in zip(tokens, values, strict=True)],
    }


def _echoed(request: Mapping[str, Any]) -> str:
    """Return the prompt where a completion begins with it."""
    if not request.get("echo"):
        return ""
    prompt: str | list[str] = request["prompt"]
    return prompt if isinstance(prompt, str) else prompt[0]


def _custom_id(record: Record) -> Json:
    """Return the id under which a line is answered, as it was given where it is no string."""
    if record.id is not None or record.columns is None:
        return record.id
    return record.columns.get("custom_id")


def _param(record: Record, error: RowError) -> str | None:
    """Return the field that an error is about; what the prompt turns out to be is its field's."""
    if isinstance(error, BodyError):
        return error.param
    if error.code == "invalid_generation_config":
        return "n"  # every other field is checked with the body; n asks for sampling as well
    if error.code not in _PROMPT_CODES or record.columns is None:
        return None
    return "messages" if record.columns.get("url") == CHAT_URL else "prompt"


def index_of_line(row: Mapping[str, Any]) -> int | None:
    """Return the index of a line that BatchLines laid out; None if it is another one's."""
    name = _LINE_ID.fullmatch(str(row.get("id")))
    return None if name is None else int(name.group(1), 16)
