"""Decides what each step runs, and takes what came of it: admission, preemption, ends.

A request is admitted when the cache has blocks for all its known tokens, so a prompt never needs
blocks in the middle, and when the lengths that all requests are expected to reach fit together.
When a decoding request still finds no block, the request that was admitted last is preempted: its
blocks go to the host pool if there is room, and it goes to the front of the queue. What the host
pool and the prefix cache then still have is not computed again; the rest is, prompt and generated
tokens alike (vLLM calls this recompute preemption).

Invariant: while a request is unfinished, every step runs at least one token. The oldest admitted
request can take the blocks of all others, and alone it fits, because `add` refuses what does not.
A request that has been scheduled in a step is not preempted in it: others may use what it computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from cbgen.engine.cache.kv_cache import KVCache
from cbgen.engine.cache.prefix import PrefixMatch
from cbgen.engine.events import EngineObserver, StepStats
from cbgen.engine.plan import EnginePlan
from cbgen.engine.request import FinishReason, Request, RequestStatus
from cbgen.engine.scheduler.admission import Admission, outgrown, refusal, token_limit
from cbgen.engine.scheduler.builder import BatchBuilder
from cbgen.engine.scheduler.waiting import UnfinishedRequests, WaitingQueue
from cbgen.engine.step import SampledTokens, ScheduledBatch, StepResult
from cbgen.errors import RowError

_MOST_SKIPPED = 64
"""Requests that may be passed over in one step because a prefix of theirs is being computed."""
_MOST_SKIPPED_AGAIN = 8
"""Those of them that have waited before."""
_MOST_TWICE = 0.125
"""Share of a step's tokens that may be computed twice, by requests that have waited once."""
_NON_FINITE = (
    "the model gave logits that are not finite numbers; float16 overflows with some models: "
    "set model.dtype to bfloat16 or float32"
)


class Scheduler(ABC):
    """Owns the waiting queue, the admitted requests (oldest admission first) and the free rows.

    The queue is in order of arrival, with preempted requests before all others. A policy decides in
    which order admitted requests get the tokens of a step, see `policies`.
    """

    def __init__(
        self, plan: EnginePlan, cache: KVCache, observer: EngineObserver | None = None
    ) -> None:
        self._cache = cache
        self._plan = plan
        self._cache_tokens = plan.cache.max_tokens  # read for every token
        self._observer = observer
        self._waiting = WaitingQueue()
        self._active: dict[str, Request] = {}
        self._unfinished: UnfinishedRequests[Request] = UnfinishedRequests()
        self._finished: list[Request] = []
        self._free_rows = list(reversed(range(plan.max_requests)))
        self._num_admissions = 0
        self._admission = Admission(plan, cache)
        self._totals = StepStats()

    @abstractmethod
    def _run_admitted(
        self, builder: BatchBuilder, decoding: list[Request], prefilling: list[Request]
    ) -> None:
        """Put admitted requests into the step, in the order of the policy."""

    def add(self, request: Request) -> None:
        """Take a request, or fail it at once if it can never run; `take_finished` then has it."""
        duplicate = request.request_id in self._unfinished
        error = refusal(request, self._plan, is_duplicate=duplicate)
        if error is not None:
            request.fail(error.code, error.message)
            self._finished.append(request)
            return
        request.max_tokens = token_limit(request, self._plan)
        self._unfinished.add(request)
        self._waiting.add(request)

    def cancel(self, request_id: str) -> None:
        """End a request and its other samples now; unknown and finished ids are ignored."""
        for request in self._unfinished.with_samples(request_id):
            self._end(request, RequestStatus.CANCELLED, FinishReason.CANCELLED)

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return len(self._unfinished) > 0

    def unfinished(self) -> list[Request]:
        """Return all requests that wait or run."""
        return list(self._unfinished)

    def take_finished(self) -> list[Request]:
        """Return the requests that ended since the last call, in the order in which they ended."""
        finished, self._finished = self._finished, []
        return finished

    def reset_prefix_cache(self) -> None:
        """Forget what was computed for other requests, because the weights have changed."""
        self._cache.reset_prefixes()

    def schedule(self) -> ScheduledBatch:
        """Decide one step; never empty while a request is unfinished."""
        builder = BatchBuilder(self._totals.num_steps + 1, self._plan.max_batch_tokens)
        no_room = self._cache_tokens + 1
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self._active.values():
            missing = request.num_tokens - request.num_computed_tokens
            if missing > 1:
                prefilling.append(request)
            # A request whose last token, or the last that can be stored, is being sampled has
            # nothing left to run.
            elif missing == 1 and request.num_tokens < min(request.max_tokens, no_room):
                decoding.append(request)
        self._run_admitted(builder, decoding, prefilling)
        if self._waiting:
            self._admit_waiting(builder)
        totals = self._totals
        totals.num_steps += 1
        totals.num_computed_tokens += builder.num_tokens
        totals.peak_used_blocks = max(totals.peak_used_blocks, self._cache.pool.num_used)
        return builder.build()

    def update(self, batch: ScheduledBatch, result: StepResult) -> None:
        """Append what was sampled; end requests that reached a stop or their limit."""
        active = self._active
        sampling = [item for item in batch.requests if item.num_samples]
        for item, sampled in zip(sampling, result.samples, strict=True):
            request = active.get(item.request_id)
            # Ended or preempted while the step ran: its tokens are dropped, or drawn again later.
            if request is not None and request.admission == item.admission:
                request.num_pending_tokens -= 1
                request.num_tokens -= 1
                self._append(request, sampled)

    def stats(self) -> StepStats:
        """Return counts as of now."""
        return replace(
            self._totals,
            num_waiting=len(self._waiting),
            num_running=len(self._active),
            num_blocks=self._cache.pool.num_blocks,
            num_used_blocks=self._cache.pool.num_used,
            num_evictions=self._cache.pool.num_evictions,
        )

    def check(self) -> None:
        """Recompute all bookkeeping from scratch.

        Raises:
            AssertionError: something disagrees.
        """
        active, waiting = list(self._active.values()), list(self._waiting)
        self._cache.check(active, waiting)
        self._waiting.check()
        self._unfinished.check([*(request.request_id for request in waiting), *self._active])
        self._admission.check(active)
        rows = sorted([*self._free_rows, *(request.row for request in active)])
        if rows != list(range(self._plan.max_requests)):
            raise AssertionError(f"rows are lost or taken twice: {rows}")
        for request in active:
            if not 0 <= request.num_computed_tokens <= request.num_tokens <= request.max_tokens:
                raise AssertionError(f"{request.request_id} has computed more than it knows")
            if request.num_tokens != request.num_known_tokens + request.num_pending_tokens:
                raise AssertionError(f"{request.request_id} has lost count of its tokens")
        admissions = [request.admission for request in active]
        if admissions != sorted(admissions):
            raise AssertionError("admitted requests are not in order of admission")

    def _decode(self, builder: BatchBuilder, requests: Sequence[Request]) -> None:
        """Run one token of each request, as far as tokens and blocks are left."""
        runnable: list[Request] = []
        for request in requests[: builder.tokens_left]:
            if request.num_tokens > request.num_slots:
                # Those before it have their blocks and must not lose them to it any more.
                builder.decode(runnable)
                runnable = []
                if request.row < 0 or not self._grow(request, builder):
                    continue
            if request.row >= 0:
                runnable.append(request)
        builder.decode(runnable)

    def _prefill(self, builder: BatchBuilder, requests: Sequence[Request]) -> None:
        """Run chunks of known tokens in order, until no tokens are left."""
        for request in requests:
            if request.row < 0:
                continue
            wanted = request.num_tokens - request.num_computed_tokens
            count = min(wanted, builder.tokens_left, self._plan.cache.chunk_tokens)
            if count == 0:
                return
            end = request.num_computed_tokens + count
            if end <= request.num_slots or self._grow(request, builder):
                builder.prefill(request, count)

    def _admit_waiting(self, builder: BatchBuilder) -> None:
        """Admit requests in order, as far as rows, tokens and blocks are left.

        One whose prefix is being computed is passed over until it is stored: to wait for it once
        costs no more than a step. But where each of many prompts continues the one before it, each
        would wait for its neighbour, step after step, and one be admitted in each. So a request
        that has waited computes the tokens itself if they are few: a step computes a small share of
        its tokens twice, and the line moves by as many requests as that allows.
        """
        if builder.tokens_left == 0 or not self._free_rows:
            return
        self._waiting.wake(builder.step)
        most_twice = int(_MOST_TWICE * self._plan.max_batch_tokens)
        num_skipped = num_skipped_again = 0
        while builder.tokens_left and self._free_rows:
            request = self._waiting.first()
            if request is None:
                return
            match = self._cache.match(request, builder.step)
            awaited = match.awaited
            if awaited is not None and self._active:
                if not request.has_waited or awaited.num_saved > most_twice:
                    if num_skipped == _MOST_SKIPPED or num_skipped_again == _MOST_SKIPPED_AGAIN:
                        return
                    num_skipped += 1
                    num_skipped_again += request.has_waited
                    request.has_waited = True
                    self._waiting.hold(awaited)
                    continue
                most_twice -= awaited.num_saved
            if not self._admission.fits(request, match, is_alone=not self._active):
                return
            self._waiting.pop()
            self._admit(request, match, builder)
            self._prefill(builder, (request,))

    def _admit(self, request: Request, match: PrefixMatch, builder: BatchBuilder) -> None:
        self._num_admissions += 1
        self._active[request.request_id] = request
        self._admission.add(request)
        request.admit(self._free_rows.pop(), self._num_admissions)
        builder.admit(request, self._cache.admit(request, match, builder.step))
        computed = request.num_computed_tokens
        if request.num_preemptions == 0:
            self._totals.num_cached_tokens += computed
        else:
            self._totals.num_recomputed_tokens += max(0, request.num_lost_tokens - computed)
        if self._observer is not None:
            num_tokens = request.num_tokens - computed
            self._observer.admitted(request.row, request.request_id, num_tokens)

    def _grow(self, request: Request, builder: BatchBuilder) -> bool:
        """Get blocks for a request, if need be from younger ones; False if it was preempted."""
        start = request.num_computed_tokens
        while (growth := self._cache.grow(request, start)) is None:
            youngest = next(
                other
                for other in reversed(self._active.values())
                if other.settled_step != builder.step
            )
            self._preempt(youngest, builder)
            if youngest is request:
                return False
        builder.new_blocks += growth
        return True

    def _preempt(self, request: Request, builder: BatchBuilder) -> None:
        swaps = self._cache.offload(request)
        if swaps is not None:
            builder.swaps_out += swaps
            self._totals.num_offloaded_blocks += len(swaps)
        self._totals.num_preemptions += 1
        self._admission.expectation.preempted()
        if self._observer is not None:
            self._observer.preempted(request.row, request.num_computed_tokens)
        self._release(request)
        request.preempt()
        self._waiting.add_first(request)

    def _append(self, request: Request, sampled: SampledTokens) -> None:
        """Append tokens until one ends the request."""
        if not sampled.is_finite:
            self._fail(request, RowError("non_finite_logits", _NON_FINITE))
            return
        if request.status is not RequestStatus.DECODING:
            request.status = RequestStatus.DECODING
            if self._observer is not None:
                self._observer.decoding(request.row)
        params = request.params
        for position, token_id in enumerate(sampled.token_ids):
            request.generated_tokens.append(token_id)
            request.num_tokens += 1
            self._totals.num_generated_tokens += 1
            if params.logprobs is not None:
                request.logprobs.append(sampled.logprobs[position])
            known = request.num_tokens - request.num_pending_tokens
            reason = None
            if token_id in params.stop_token_ids:
                reason = FinishReason.STOP
            elif known >= request.max_tokens:
                reason = FinishReason.LENGTH
            if request.stop_checker is not None:
                request.stop_checker.push((token_id,), is_last=reason is not None)
                if request.stop_string is not None:
                    reason = FinishReason.STOP
            if reason is not None:
                self._end(request, RequestStatus.FINISHED, reason)
                return
            if known > self._cache_tokens:
                self._fail(request, outgrown(self._cache_tokens))
                return

    def _end(self, request: Request, status: RequestStatus, reason: FinishReason) -> None:
        self._leave(request, reason)
        request.finish(status, reason)

    def _fail(self, request: Request, error: RowError) -> None:
        self._leave(request, FinishReason.ERROR)
        request.fail(error.code, error.message)

    def _leave(self, request: Request, reason: FinishReason) -> None:
        num_generated = len(request.generated_tokens)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._admission.expectation.ended(num_generated)
        if request.row >= 0:
            if self._observer is not None:
                self._observer.ended(request.row, reason.value, num_generated)
            # Keys and values of a model that gave no numbers are of no use to others.
            self._release(request, keep=reason is not FinishReason.ERROR)
        else:
            self._waiting.remove(request)
            self._cache.forget(request)
        self._unfinished.remove(request)
        self._finished.append(request)

    def _release(self, request: Request, *, keep: bool = True) -> None:
        del self._active[request.request_id]
        self._admission.remove(request)
        self._free_rows.append(request.row)
        self._cache.free(request, keep=keep)
