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
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from cbgen.errors import RowError
from cbgen.io.openai.body_fields import BodyError, Json
from cbgen.io.openai.requests import CHAT_URL
from cbgen.io.records import Record
from cbgen.io.rows import Answer, RowOutcome, Sample, as_object, finish_reasons

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


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRun:
    """What all lines of a run share."""

    seed: int
    """Part of every id."""
    model: str
    """For a body that names no model."""
    token_ids: bool
    """Write token ids even where a body does not ask for them."""

    def digest(self, record: Record) -> str:
        """Return the 32 hexadecimal digits that the ids of a record's line are made of."""
        text = f"{self.seed}\0{record.index}\0{record.id}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, digest_size=16).hexdigest()


class OpenAILines:
    """Lines of OpenAI Batch: a refusal is a response like another, `error` is what never ran."""

    def __init__(self, run: BatchRun) -> None:
        self._run = run

    def answer(self, record: Record, answer: Answer) -> dict[str, Any]:
        """Return the line of a request that was answered."""
        body = openai_body(Completion(self._run, record, answer))
        return self._line(record, status=200, body=body)

    def failure(self, record: Record, error: RowError) -> dict[str, Any]:
        """Return the line of a request that was refused, that failed, or that never ran."""
        if record.error is not None or error.code == CANCELLED:
            code = _LINE_CODES.get(error.code, error.code)
            return {
                "id": self._id(record),
                "custom_id": _custom_id(record),
                "response": None,
                "error": {"code": code, "message": error.message},
            }
        status = _status(error)
        details = {
            "message": error.message,
            "type": "server_error" if status == 500 else "invalid_request_error",
            "param": _param(record, error),
            "code": "context_length_exceeded" if error.code in _CONTEXT_CODES else error.code,
        }
        return self._line(record, status=status, body={"error": details})

    def _line(self, record: Record, *, status: int, body: dict[str, Any]) -> dict[str, Any]:
        request_id = f"req_{self._run.digest(record)}"
        return {
            "id": self._id(record),
            "custom_id": _custom_id(record),
            "response": {"status_code": status, "request_id": request_id, "body": body},
            "error": None,
        }

    def _id(self, record: Record) -> str:
        return f"batch_req_{record.index:x}_{self._run.digest(record)[:16]}"


class VllmLines:
    """Lines of vLLM run-batch: whatever is no answer has an `error` and a response without body."""

    def __init__(self, run: BatchRun) -> None:
        self._run = run

    def answer(self, record: Record, answer: Answer) -> dict[str, Any]:
        """Return the line of a request that was answered."""
        body = vllm_body(Completion(self._run, record, answer))
        return self._line(record, status=200, body=body, error=None)

    def failure(self, record: Record, error: RowError) -> dict[str, Any]:
        """Return the line of a request that was refused, that failed, or that never ran."""
        status = _status(error)
        if isinstance(error, BodyError) and error.param in _PLAIN_MESSAGES:
            return self._line(record, status=status, body=None, error=error.message)
        details = {
            "message": error.message,
            "type": "InternalServerError" if status == 500 else "BadRequestError",
            "param": _param(record, error),
            "code": status,
        }
        return self._line(record, status=status, body=None, error={"error": details})

    def _line(
        self, record: Record, *, status: int, body: dict[str, Any] | None, error: object
    ) -> dict[str, Any]:
        digest = self._run.digest(record)
        request_id = f"vllm-batch-{digest}"
        return {
            "id": f"vllm-{record.index:x}-{digest[:16]}",
            "custom_id": _custom_id(record),
            "response": {"status_code": status, "request_id": request_id, "body": body},
            "error": error,
        }


def _custom_id(record: Record) -> Json:
    """Return the id under which a line is answered, as it was given where it is no string."""
    if record.id is not None or record.columns is None:
        return record.id
    return record.columns.get("custom_id")


def _status(error: RowError) -> int:
    return 500 if error.type == "engine_error" else 400


def _param(record: Record, error: RowError) -> str | None:
    """Return the field that an error is about; what the prompt turns out to be is its field's."""
    if isinstance(error, BodyError):
        return error.param
    if error.code == "invalid_generation_config":
        return "n"  # every other field is checked with the body; n asks for sampling as well
    if error.code not in _PROMPT_CODES or record.columns is None:
        return None
    return "messages" if record.columns.get("url") == CHAT_URL else "prompt"


def outcome_of_line(row: Mapping[str, Any]) -> RowOutcome | None:
    """Return the outcome of a line that this module laid out; None if it is another one's."""
    name = _LINE_ID.fullmatch(str(row.get("id")))
    if name is None:
        return None
    index = int(name.group(1), 16)
    response = as_object(row["response"])
    body = as_object(response.get("body"))
    error = row.get("error") or body.get("error")
    if error is not None or response.get("status_code") != 200:
        return RowOutcome.of_failure(index, error)
    return RowOutcome.of_answer(index, finish_reasons(body.get("choices")), body.get("usage"))


class Completion:
    """What an answer says in either form.

    Args:
        run: what its line shares with the others of the run.
        record: the line that is answered.
        answer: what was generated, with its token ids.
    """

    def __init__(self, run: BatchRun, record: Record, answer: Answer) -> None:
        columns = record.columns
        assert columns is not None, "an answered record has columns"
        body: Mapping[str, Any] = columns["body"]
        self.is_chat: bool = columns["url"] == CHAT_URL
        digits = body.get("request_id") or run.digest(record)
        self.head = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{digits}",
            "object": "chat.completion" if self.is_chat else "text_completion",
            "created": _CREATED,
            "model": body.get("model") or run.model,
        }
        self.samples = answer.samples
        self.prompt_tokens = len(answer.prompt_ids)
        self.completion_tokens = answer.completion_tokens
        self.total_tokens = self.prompt_tokens + self.completion_tokens
        self.wants_ids: bool = run.token_ids or bool(body.get("return_token_ids"))
        self.prompt_token_ids = list(answer.prompt_ids) if self.wants_ids else None
        self._echo = _echoed(body)
        self._shows_ids = bool(body.get("return_tokens_as_token_ids"))

    def text(self, sample: Sample) -> str:
        """Return what a sample says, behind its prompt if the body asks for that."""
        return self._echo + (sample.text or "")

    def token_ids(self, sample: Sample) -> list[int] | None:
        """Return the ids of a sample; None if they are not wanted."""
        return list(sample.generated_tokens) if self.wants_ids else None

    def logprobs(self, sample: Sample) -> dict[str, Any] | None:
        """Return the log-probabilities of a sample in the form of the endpoint."""
        given = sample.logprobs
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
    body = {
        **completion.head,
        "choices": [
            _openai_choice(completion, index, sample)
            for index, sample in enumerate(completion.samples)
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


def _openai_choice(completion: Completion, index: int, sample: Sample) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index}
    if completion.is_chat:
        choice["message"] = {
            "role": "assistant",
            "content": completion.text(sample),
            "refusal": None,
        }
    else:
        choice["text"] = completion.text(sample)
    choice["logprobs"] = completion.logprobs(sample)
    choice["finish_reason"] = sample.finish_reason
    if completion.wants_ids:
        choice["token_ids"] = completion.token_ids(sample)
        if not completion.is_chat:
            choice["prompt_token_ids"] = completion.prompt_token_ids
    return choice


def vllm_body(completion: Completion) -> dict[str, Any]:
    """Return a completion as vLLM prints it: with every field, those without a value as null."""
    body = {
        **completion.head,
        "choices": [
            _vllm_choice(completion, index, sample)
            for index, sample in enumerate(completion.samples)
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


def _vllm_choice(completion: Completion, index: int, sample: Sample) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index}
    if completion.is_chat:
        nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        choice["message"] = {"role": "assistant", "content": completion.text(sample), **nulls}
    else:
        choice["text"] = completion.text(sample)
    choice["logprobs"] = completion.logprobs(sample)
    choice["finish_reason"] = sample.finish_reason
    choice["stop_reason"] = sample.stop_reason
    choice["token_ids"] = completion.token_ids(sample)
    if not completion.is_chat:
        choice["prompt_logprobs"] = None
        choice["prompt_token_ids"] = completion.prompt_token_ids
    return choice | {"routed_experts": None, "weight_versions": None}
