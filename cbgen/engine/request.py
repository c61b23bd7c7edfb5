"""One request: its prompt, its progress, and the answer that leaves the engine."""

from __future__ import annotations

import time
from dataclasses import InitVar, dataclass, field
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


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """The state of one request inside the engine. Scheduler and cache change it, nobody else.

    The cache sets `num_slots`, and at an admission `num_computed_tokens`, `num_settled_tokens` and
    `settled_step`, since it knows what need not be computed. All else is the scheduler's.

    There is no prefill phase and no decode phase: `num_computed_tokens` (keys and values in the
    cache) chases `num_tokens` (tokens known or being sampled). Invariants: 0 <= num_computed_tokens
    <= num_tokens; `row` is set exactly while the request is admitted.

    Args:
        request_id: no other unfinished request has it.
        prompt_ids: are copied.
        params: how its tokens are drawn, and what ends it.
        parent_id: the request that it is another sample of, and with which it is cancelled.
        tokenizer: decodes its answer; without one a request with stop strings fails.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    parent_id: str | None = field(default=None, kw_only=True)
    tokenizer: InitVar[TokenDecoder | None] = field(default=None, kw_only=True)
    status: RequestStatus = field(default=RequestStatus.PENDING, init=False)
    generated_tokens: list[int] = field(default_factory=list, init=False)
    logprobs: list[float] = field(default_factory=list, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)
    error_code: str | None = field(default=None, init=False)
    row: int = field(default=-1, init=False)
    admission: int = field(default=0, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_tokens: int = field(init=False)
    """Tokens known and tokens being sampled."""
    num_pending_tokens: int = field(default=0, init=False)
    """Tokens sampled in a step whose result has not come back yet."""
    num_settled_tokens: int = field(default=0, init=False)
    """Tokens that were in the cache already when step `settled_step` began."""
    settled_step: int = field(default=-1, init=False)
    num_slots: int = field(default=0, init=False)
    """Tokens for which the cache has given it room."""
    num_lost_tokens: int = field(default=0, init=False)
    """Tokens that were computed when it was preempted."""
    num_preemptions: int = field(default=0, init=False)
    has_waited: bool = field(default=False, init=False)
    """Whether it was passed over for a prefix that another request computed."""
    max_tokens: int = field(default=0, init=False)
    """Most tokens of prompt and answer together; set when the scheduler takes it."""
    expected_blocks: int = field(default=0, init=False)
    """Blocks of the cache that its whole length is expected to take."""
    stop_checker: StopChecker | None = field(default=None, init=False)
    """Looks for its stop strings; None if it has none, or without a tokenizer."""
    created_time: float = field(default_factory=time.perf_counter, init=False)
    started_time: float = field(default=-1.0, init=False)
    finished_time: float = field(default=-1.0, init=False)

    def __post_init__(self, tokenizer: TokenDecoder | None) -> None:
        self.prompt_ids = list(self.prompt_ids)
        self.num_tokens = len(self.prompt_ids)
        if tokenizer is not None and self.params.stop_strings:
            self.stop_checker = StopChecker(
                tokenizer,
                self.params.stop_strings,
                skip_special_tokens=self.params.skip_special_tokens,
            )

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
