"""A scheduler over shadow blocks: every step verifies what its queries see. Imports no torch."""

from __future__ import annotations

import random

from cbgen.engine.cache.groups import AttentionSpan
from cbgen.engine.events import StepStats
from cbgen.engine.request import Request, RequestStatus
from cbgen.engine.scheduler.policies import make_scheduler
from cbgen.engine.step import ScheduledBatch
from tests.helpers.engine import make_cache, make_plan, make_request
from tests.helpers.shadow import VOCAB_SIZE, ShadowRunner, shadow_answer


def text(kind: int, count: int) -> list[int]:
    """Return tokens that begin with `kind`: two texts of different kinds share nothing."""
    choose = random.Random(kind)
    return [kind, *(choose.randrange(1, VOCAB_SIZE) for _ in range(count))][:count]


class ShadowRun:
    """A scheduler that shares prefixes, its cache, and a runner that remembers every key.

    Args:
        scheduler_type: name of the scheduler.
        num_blocks: blocks of the pool.
        page_size: tokens of a block.
        spans: attention span of each group.
        shares_prefixes: whether requests may use one another's blocks.
        num_host_blocks: blocks of host memory for preempted requests.
        limits: fields of EnginePlan.
    """

    def __init__(
        self,
        scheduler_type: str = "fifo",
        *,
        num_blocks: int = 64,
        page_size: int = 4,
        spans: tuple[AttentionSpan, ...] = (AttentionSpan(),),
        shares_prefixes: bool = True,
        num_host_blocks: int = 0,
        **limits,
    ) -> None:
        limits = {"max_batch_tokens": 256, "max_context": 512} | limits
        self.cache = make_cache(
            num_blocks,
            page_size,
            spans=spans,
            max_batch_tokens=limits["max_batch_tokens"],
            shares_prefixes=shares_prefixes,
            num_host_blocks=num_host_blocks,
        )
        plan = make_plan(self.cache.shape, scheduler_type=scheduler_type, **limits)
        self.scheduler = make_scheduler(plan, self.cache)
        self.runner = ShadowRunner(page_size, spans)

    @property
    def stats(self) -> StepStats:
        return self.scheduler.stats()

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def step(self) -> ScheduledBatch:
        """Run one step, checking the bookkeeping before and after its result comes back."""
        batch = self.scheduler.schedule()
        self.scheduler.check()
        self.scheduler.update(batch, self.runner.launch(batch).result())
        self.scheduler.check()
        return batch

    def finish(self, *requests: Request) -> list[Request]:
        """Add requests, step until all have ended, and verify the answers of those that finished.

        Returns:
            The requests that ended, in the order in which they did.
        """
        self.add(*requests)
        while self.scheduler.has_unfinished():
            assert self.step().num_tokens > 0
        ended = self.scheduler.take_finished()
        for request in ended:
            if request.status is RequestStatus.FINISHED:
                assert request.generated_tokens == shadow_answer(request)
        return ended

    def remember(self, prompt: list[int], request_id: str = "earlier") -> None:
        """Run a prompt to the first token of its answer, so that its blocks are cached."""
        self.finish(make_request(request_id, prompt, max_new_tokens=1))

    def num_reused(self, prompt: list[int], request_id: str = "later") -> int:
        """Run a prompt to the first token of its answer; return how much of it was not computed."""
        before = self.stats.num_cached_tokens
        self.remember(prompt, request_id)
        return self.stats.num_cached_tokens - before
