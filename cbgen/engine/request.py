"""One request: its prompt, its progress, and the answer that leaves the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from cbgen.engine.sampling.params import SamplingParams
from cbgen.engine.text import StopChecker, TokenDecoder


class RequestStatus(IntEnum):
    """Life of a request; everything from FINISHED on is final."""

    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    FAILED = 4
    CANCELLED = 5


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(slots=True, kw_only=True)
class GenerationOutput:
    """What is known of a request when it leaves the engine.

    `generated_tokens` includes the stop token, or the token that completed `stop_string`, the stop
    string that ended the answer; its text is cut before it. `logprobs` is as long as
    `generated_tokens` when asked for, else empty. Times are seconds of `time.perf_counter()`.
    """

    request_id: str
    prompt_ids: list[int]
    generated_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    status: RequestStatus = RequestStatus.PENDING
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    error: str | None = None
    error_code: str | None = None
    created_time: float = 0.0
    lifespan: tuple[float, float] = (-1.0, -1.0)
    """Admission and end; -1 where it has not happened."""

    def is_finished(self) -> bool:
        """Whether the request has reached its final status."""
        return self.status >= RequestStatus.FINISHED


class Request:
    """The state of one request inside the engine. Scheduler and cache change it, nobody else.

    The cache sets `num_slots` and `packed_tokens`, and at an admission `num_computed_tokens` and
    what is settled, since it knows what need not be computed. All else is the scheduler's.

    There is no prefill phase and no decode phase: `num_computed_tokens` (keys and values in the
    cache) chases `num_tokens` (tokens known or being sampled). Invariants: 0 <= num_computed_tokens
    <= num_tokens; `row` is set exactly while the request is admitted.

    Attributes:
        num_tokens: tokens known and tokens being sampled.
        num_pending_tokens: tokens sampled in a step whose result has not come back yet.
        num_settled_tokens: tokens that were in the cache before step `settled_step` began.
        num_slots: tokens for which the cache has given it room.
        num_lost_tokens: tokens that were computed when it was preempted.
        max_tokens: most tokens of prompt and answer together; set when the scheduler takes it.
        expected_blocks: blocks of the cache that its whole length is expected to take.
        parent_id: the request that it is another sample of, and with which it is cancelled.
        stop_checker: looks for its stop strings; None if it has none, or without a tokenizer.
        packed_tokens: its known tokens as the prefix cache compares them; None if not packed.

    Args:
        request_id: no other unfinished request has it.
        prompt_ids: are copied.
        params: how its tokens are drawn, and what ends it.
        parent_id: see above.
        tokenizer: decodes its answer; without one a request with stop strings fails.
    """

    __slots__ = (
        "admission",
        "created_time",
        "error",
        "error_code",
        "expected_blocks",
        "finish_reason",
        "finished_time",
        "generated_tokens",
        "logprobs",
        "max_tokens",
        "num_computed_tokens",
        "num_lost_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_settled_tokens",
        "num_slots",
        "num_tokens",
        "packed_tokens",
        "params",
        "parent_id",
        "prompt_ids",
        "request_id",
        "row",
        "settled_step",
        "started_time",
        "status",
        "stop_checker",
    )

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        parent_id: str | None = None,
        tokenizer: TokenDecoder | None = None,
    ) -> None:
        self.request_id = request_id
        self.parent_id = parent_id
        self.prompt_ids = list(prompt_ids)
        self.params = params
        self.status = RequestStatus.PENDING
        self.generated_tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.error_code: str | None = None
        self.row = -1
        self.admission = 0
        self.num_computed_tokens = 0
        self.num_tokens = len(self.prompt_ids)
        self.num_pending_tokens = 0
        self.num_settled_tokens = 0
        self.settled_step = -1
        self.num_slots = 0
        self.num_lost_tokens = 0
        self.num_preemptions = 0
        self.max_tokens = 0
        self.expected_blocks = 0
        self.stop_checker: StopChecker | None = None
        if tokenizer is not None and params.stop_strings:
            self.stop_checker = StopChecker(
                tokenizer,
                params.stop_strings,
                skip_special_tokens=params.skip_special_tokens,
            )
        self.packed_tokens: bytes | None = None
        self.created_time = time.perf_counter()
        self.started_time = -1.0
        self.finished_time = -1.0

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.prompt_ids) + len(self.generated_tokens)

    @property
    def is_finished(self) -> bool:
        """Whether the request has reached its final status."""
        return self.status >= RequestStatus.FINISHED

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it."""
        return None if self.stop_checker is None else self.stop_checker.stop_string

    def settled_tokens(self, step: int) -> int:
        """Return how many of its tokens were in the cache before a step, the running one."""
        return self.num_settled_tokens if self.settled_step == step else self.num_computed_tokens

    def admit(self, row: int, admission: int) -> None:
        """Take a row; the cache has been asked for blocks, and says how much is computed."""
        self.row = row
        self.admission = admission
        self.status = RequestStatus.PREFILLING
        if self.started_time < 0:
            self.started_time = time.perf_counter()

    def preempt(self) -> None:
        """Give the row back to start over later; tokens being sampled are drawn again."""
        self.num_lost_tokens = self.num_computed_tokens
        self._release()
        self.status = RequestStatus.PENDING
        self.num_preemptions += 1

    def finish(self, status: RequestStatus, reason: FinishReason) -> None:
        """Reach a final status."""
        self._release()
        self.status = status
        self.finish_reason = reason
        self.finished_time = time.perf_counter()

    def fail(self, code: str, message: str) -> None:
        """End with an error that belongs to this request alone."""
        self.error_code = code
        self.error = message
        self.finish(RequestStatus.FAILED, FinishReason.ERROR)

    def output(self) -> GenerationOutput:
        """Return the answer as it stands."""
        return GenerationOutput(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            generated_tokens=self.generated_tokens,
            logprobs=self.logprobs,
            status=self.status,
            finish_reason=self.finish_reason,
            stop_string=self.stop_string,
            error=self.error,
            error_code=self.error_code,
            created_time=self.created_time,
            lifespan=(self.started_time, self.finished_time),
        )

    def _release(self) -> None:
        self.row = -1
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.num_tokens = self.num_known_tokens
