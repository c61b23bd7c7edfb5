"""Answers and failures of batch lines, as OpenAI Batch and vLLM run-batch write them.

Everything in a line is a function of run seed, index and request: ids are hashes and `created` is
0, so that a resumed file equals an undisturbed one. The index of a line stands in its `id`, as a
hexadecimal number between prefix and hash.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any, Protocol

from cbgen.errors import RowError
from cbgen.io.openai.bodies import Completion, openai_body, vllm_body
from cbgen.io.openai.body_fields import BodyError, Json
from cbgen.io.openai.requests import CHAT_URL
from cbgen.io.reader import Record
from cbgen.io.rows import Answer

LINE_ID = re.compile(r"(?:batch_req_|vllm-)([0-9a-f]+)[_-][0-9a-f]{16}")
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


class RowDialect(Protocol):
    """Lays out the output rows of the records of one dialect."""

    def answer(self, record: Record, answer: Answer) -> dict[str, Any]:
        """Return the row of a record that was answered."""

    def failure(self, record: Record, error: RowError) -> dict[str, Any]:
        """Return the row of a record that could not be answered."""


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

    def completion(self, record: Record, answer: Answer) -> Completion:
        """Return the completion that answers a record."""
        return Completion(
            record,
            answer,
            digest=self.digest(record),
            model=self.model,
            token_ids=self.token_ids,
        )


class OpenAILines:
    """Lines of OpenAI Batch: a refusal is a response like another, `error` is what never ran."""

    def __init__(self, run: BatchRun) -> None:
        self._run = run

    def answer(self, record: Record, answer: Answer) -> dict[str, Any]:
        """Return the line of a request that was answered."""
        body = openai_body(self._run.completion(record, answer))
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
        body = vllm_body(self._run.completion(record, answer))
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
