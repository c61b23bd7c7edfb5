"""First in, first out: decoding requests first, then prompts in order of arrival, cut into chunks.

A request is admitted when the cache has blocks for all its known tokens, so a prompt never needs
blocks in the middle; only decoding requests grow. When one of them finds no block, the request that
was admitted last is preempted: it gives everything back, goes to the front of the queue and is
computed again later, prompt and generated tokens alike (vLLM calls this recompute preemption).

Invariant: while a request is unfinished, every step runs at least one token. The oldest admitted
request can take the blocks of all others, and alone it fits, because `add` refuses what does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from cbgen.engine.cache.kv_cache import KVCache
from cbgen.engine.events import EngineObserver, StepStats
from cbgen.engine.request import FinishReason, Request, RequestStatus
from cbgen.engine.scheduler.admission import outgrown, refusal, token_limit
from cbgen.engine.scheduler.base import SchedulerLimits
from cbgen.engine.scheduler.budget import TokenBudget
from cbgen.engine.step import (
    AdmittedRow,
    NewBlocks,
    SampledTokens,
    ScheduledBatch,
    ScheduledRequest,
    StepResult,
)
from cbgen.errors import RowError

_NON_FINITE = (
    "the model gave logits that are not finite numbers; float16 overflows with some models: "
    "set model.dtype to bfloat16 or float32"
)


class FifoScheduler:
    """Owns the waiting queue, the admitted requests (oldest admission first) and the free rows."""

    def __init__(
        self, cache: KVCache, limits: SchedulerLimits, observer: EngineObserver | None = None
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._observer = observer
        self._waiting: deque[Request] = deque()
        self._active: dict[str, Request] = {}
        self._unfinished: dict[str, Request] = {}
        self._finished: list[Request] = []
        self._free_rows = list(reversed(range(limits.max_requests)))
        self._num_admissions = 0
        self._stats = StepStats(num_blocks=cache.num_blocks)

    def add(self, request: Request) -> None:
        """Take a request, or fail it at once if it can never run; `take_finished` then has it."""
        duplicate = request.request_id in self._unfinished
        error = refusal(request, self._limits, self._cache.max_tokens, is_duplicate=duplicate)
        if error is not None:
            request.fail(error.code, error.message)
            self._finished.append(request)
            return
        request.max_tokens = token_limit(request, self._limits, self._cache.max_tokens)
        self._unfinished[request.request_id] = request
        self._waiting.append(request)

    def cancel(self, request_id: str) -> None:
        """End a request now with what it has; unknown and finished ids are ignored."""
        request = self._unfinished.get(request_id)
        if request is None:
            return
        if request_id not in self._active:
            self._waiting.remove(request)
        self._end(request, RequestStatus.CANCELLED, FinishReason.CANCELLED)

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._unfinished)

    def unfinished(self) -> Iterable[Request]:
        """Return all requests that wait or run."""
        return list(self._unfinished.values())

    def take_finished(self) -> list[Request]:
        """Return the requests that ended since the last call, in the order in which they ended."""
        finished, self._finished = self._finished, []
        return finished

    def schedule(self) -> ScheduledBatch:
        """Decide one step; never empty while a request is unfinished."""
        budget = TokenBudget(self._limits.max_batch_tokens)
        scheduled: list[ScheduledRequest] = []
        new_blocks: list[NewBlocks] = []
        for request in self._decoding():
            if request.row >= 0 and self._grow(request, new_blocks):
                scheduled.append(self._run(request, budget))
        for request in self._prefilling():
            if budget.left == 0:
                break
            scheduled.append(self._run(request, budget))
        admitted: list[AdmittedRow] = []
        while self._waiting and budget.left > 0 and self._may_admit(self._waiting[0]):
            request = self._waiting.popleft()
            admitted.append(self._admit(request, new_blocks))
            scheduled.append(self._run(request, budget))
        used_blocks = self._cache.num_blocks - self._cache.num_free_blocks
        self._stats = replace(
            self._stats,
            num_steps=self._stats.num_steps + 1,
            num_computed_tokens=self._stats.num_computed_tokens + budget.used,
            peak_used_blocks=max(self._stats.peak_used_blocks, used_blocks),
        )
        return ScheduledBatch(
            step=self._stats.num_steps,
            admitted=tuple(admitted),
            new_blocks=tuple(new_blocks),
            requests=tuple(scheduled),
            num_tokens=budget.used,
        )

    def update(self, batch: ScheduledBatch, result: StepResult) -> None:
        """Append what was sampled; end requests that reached a stop token or their limit."""
        sampling = (item for item in batch.requests if item.num_samples)
        num_generated = 0
        for item, sampled in zip(sampling, result.samples, strict=True):
            request = self._active.get(item.request_id)
            # Ended or preempted while the step ran: its tokens are dropped, or drawn again later.
            if request is not None and request.admission == item.admission:
                request.num_pending_tokens -= 1
                num_generated += self._append(request, sampled)
        self._stats = replace(
            self._stats, num_generated_tokens=self._stats.num_generated_tokens + num_generated
        )

    def stats(self) -> StepStats:
        """Return counts as of now."""
        return replace(
            self._stats,
            num_waiting=len(self._waiting),
            num_running=len(self._active),
            num_used_blocks=self._cache.num_blocks - self._cache.num_free_blocks,
        )

    def check(self) -> None:
        """Recompute all bookkeeping from scratch.

        Raises:
            AssertionError: something disagrees.
        """
        active = list(self._active.values())
        self._cache.check((r.request_id, r.num_computed_tokens, r.num_tokens) for r in active)
        rows = sorted([*self._free_rows, *(request.row for request in active)])
        if rows != list(range(self._limits.max_requests)):
            raise AssertionError(f"rows are lost or taken twice: {rows}")
        waiting = [request.request_id for request in self._waiting]
        if sorted([*waiting, *self._active]) != sorted(self._unfinished):
            raise AssertionError("a request is neither waiting nor admitted, or both")
        for request in active:
            if not 0 <= request.num_computed_tokens <= request.num_tokens <= request.max_tokens:
                raise AssertionError(f"{request.request_id} has computed more than it knows")
        admissions = [request.admission for request in active]
        if admissions != sorted(admissions):
            raise AssertionError("admitted requests are not in order of admission")

    def _decoding(self) -> list[Request]:
        # A request whose last allowed token is being sampled has nothing left to run.
        return [
            request
            for request in self._active.values()
            if request.num_tokens - request.num_computed_tokens == 1
            and request.num_tokens < request.max_tokens
        ]

    def _prefilling(self) -> Iterator[Request]:
        return (r for r in self._active.values() if r.num_tokens - r.num_computed_tokens > 1)

    def _may_admit(self, request: Request) -> bool:
        if not self._free_rows:
            return False
        if self._active:
            reserve = self._limits.safety_margin * self._cache.num_blocks
            if self._cache.num_free_blocks < reserve:
                return False
        return self._cache.can_allocate(request.request_id, request.num_tokens)

    def _admit(self, request: Request, new_blocks: list[NewBlocks]) -> AdmittedRow:
        self._num_admissions += 1
        request.admit(self._free_rows.pop(), self._num_admissions)
        self._active[request.request_id] = request
        first, blocks = self._cache.allocate(request.request_id, request.num_tokens)
        new_blocks.append(NewBlocks(request.row, first, blocks))
        if self._observer is not None:
            self._observer.admitted(request.row, request.request_id, request.num_tokens)
        token_ids = [*request.prompt_ids, *request.generated_tokens]
        return AdmittedRow(request.row, token_ids, request.params)

    def _grow(self, request: Request, new_blocks: list[NewBlocks]) -> bool:
        """Get room for one more token, if need be from younger requests; False if preempted."""
        while not self._cache.can_allocate(request.request_id, request.num_tokens):
            youngest = next(reversed(self._active.values()))
            self._preempt(youngest)
            if youngest is request:
                return False
        first, blocks = self._cache.allocate(request.request_id, request.num_tokens)
        if blocks:
            new_blocks.append(NewBlocks(request.row, first, blocks))
        return True

    def _preempt(self, request: Request) -> None:
        self._stats = replace(
            self._stats,
            num_preemptions=self._stats.num_preemptions + 1,
            num_recomputed_tokens=self._stats.num_recomputed_tokens + request.num_computed_tokens,
        )
        if self._observer is not None:
            self._observer.preempted(request.row, request.num_computed_tokens)
        self._release(request)
        request.preempt()
        self._waiting.appendleft(request)

    def _run(self, request: Request, budget: TokenBudget) -> ScheduledRequest:
        start = request.num_computed_tokens
        num_tokens = budget.take(request.num_tokens - start)
        request.num_computed_tokens += num_tokens
        # The last known token is among these exactly when the next one can be sampled.
        num_samples = int(request.num_computed_tokens == request.num_tokens)
        request.num_pending_tokens += num_samples
        return ScheduledRequest(
            row=request.row,
            admission=request.admission,
            request_id=request.request_id,
            start=start,
            num_tokens=num_tokens,
            num_logits=num_samples,
            num_samples=num_samples,
        )

    def _append(self, request: Request, sampled: SampledTokens) -> int:
        """Append tokens until one ends the request; return how many were appended."""
        if not sampled.is_finite:
            self._fail(request, RowError("non_finite_logits", _NON_FINITE))
            return 0
        if self._observer is not None and request.status is not RequestStatus.DECODING:
            self._observer.decoding(request.row)
        request.status = RequestStatus.DECODING
        for position, token_id in enumerate(sampled.token_ids):
            request.generated_tokens.append(token_id)
            if request.params.logprobs is not None:
                request.logprobs.append(sampled.logprobs[position])
            if token_id in request.params.stop_token_ids:
                self._end(request, RequestStatus.FINISHED, FinishReason.STOP)
            elif request.num_known_tokens >= request.max_tokens:
                self._end(request, RequestStatus.FINISHED, FinishReason.LENGTH)
            elif request.num_known_tokens > self._cache.max_tokens:
                self._fail(request, outgrown(self._cache.max_tokens))
            if request.is_finished:
                return position + 1
        return len(sampled.token_ids)

    def _end(self, request: Request, status: RequestStatus, reason: FinishReason) -> None:
        self._leave(request, reason)
        request.finish(status, reason)

    def _fail(self, request: Request, error: RowError) -> None:
        self._leave(request, FinishReason.ERROR)
        request.fail(error.code, error.message)

    def _leave(self, request: Request, reason: FinishReason) -> None:
        if self._observer is not None and request.row >= 0:
            num_generated = len(request.generated_tokens)
            self._observer.ended(request.row, reason.value, num_generated)
        self._release(request)
        del self._unfinished[request.request_id]
        self._finished.append(request)

    def _release(self, request: Request) -> None:
        if self._active.pop(request.request_id, None) is not None:
            self._free_rows.append(request.row)
            self._cache.free(request.request_id)
