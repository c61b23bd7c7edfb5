"""Random schedules in which a step is decided before the last one's tokens are known."""

from __future__ import annotations

import random

import pytest

from cbgen.engine.cache.groups import AttentionSpan
from cbgen.engine.request import Request, RequestStatus
from cbgen.engine.step import SampledTokens, ScheduledBatch, StepResult
from tests.helpers.engine import make_request
from tests.helpers.shadow import shadow_answer
from tests.helpers.shadow_run import ShadowRun, text

FULL = AttentionSpan()
SPANS = (
    (FULL,),
    (AttentionSpan(window=7), FULL),
    (AttentionSpan(chunk=8), FULL),
    (AttentionSpan(window=5),),
)
NUM_REQUESTS, MAX_TOKENS = 20, 48


class Flight:
    """One random run; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        choose, spans = self.choose, SPANS[seed % len(SPANS)]
        page_size = choose.choice([4, 8, 16])
        self.run = ShadowRun(
            choose.choice(["fifo", "prefill_first"]),
            num_blocks=-(-MAX_TOKENS // page_size) * len(spans) + choose.choice([0, 1, 3]),
            page_size=page_size,
            spans=spans,
            num_host_blocks=choose.choice([0, 4, 100]),
            max_batch_tokens=choose.choice([6, 16, 64]),
            max_requests=choose.choice([2, 4, 6]),
            max_context=MAX_TOKENS,
        )
        self.share_of_failures = choose.choice([0.0, 0.03])
        self.requests = [self.request(number) for number in range(NUM_REQUESTS)]

    def request(self, number: int) -> Request:
        choose = self.choose
        start = text(choose.randrange(1, 4), choose.choice([3, 9, 16, 30]))
        prompt = start + text(choose.randrange(4, 9), choose.choice([0, 1, 5]))
        bound = min(choose.choice([1, 5, 20, 50]), MAX_TOKENS - len(prompt))
        stop = frozenset(range(1, choose.choice([1, 5])))
        parent_id = "0" if number and choose.random() < 0.1 else None
        return make_request(
            str(number), prompt, parent_id=parent_id, max_new_tokens=bound, stop_token_ids=stop
        )

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run a step; now and then, logits are not numbers."""
        broken = SampledTokens((), is_finite=False)
        samples = self.run.runner.launch(batch).result().samples
        return StepResult(
            tuple(
                broken if self.choose.random() < self.share_of_failures else one for one in samples
            )
        )

    def interfere(self, to_come: list[Request]) -> None:
        """Let requests arrive, end and be forgotten between two steps."""
        choose, scheduler = self.choose, self.run.scheduler
        for _ in range(choose.choice([0, 0, 1, 2, 8])):
            if to_come:
                scheduler.add(to_come.pop())
        unfinished = list(scheduler.unfinished())
        if unfinished and choose.random() < 0.05:
            scheduler.cancel(choose.choice(unfinished).request_id)
        if choose.random() < 0.01:
            scheduler.reset_prefix_cache()

    def finish(self) -> None:
        """Run all requests; each step is decided while the one before is in flight."""
        scheduler = self.run.scheduler
        to_come = list(reversed(self.requests))
        in_flight: ScheduledBatch | None = None
        while to_come or scheduler.has_unfinished() or in_flight is not None:
            self.interfere(to_come)
            batch = scheduler.schedule() if scheduler.has_unfinished() else None
            scheduler.check()
            # All that run may be waiting for their last token, but never without a step in flight.
            assert batch is None or batch.num_tokens > 0 or in_flight is not None
            if in_flight is not None:
                scheduler.update(in_flight, self.execute(in_flight))
                scheduler.check()
            in_flight = batch


def finished(seed: int) -> Flight:
    """Run one schedule and compare every answer."""
    flight = Flight(seed)
    flight.finish()
    for request in flight.requests:
        answer = shadow_answer(request)
        if request.status is not RequestStatus.FINISHED:
            answer = answer[: len(request.generated_tokens)]
        assert request.generated_tokens == answer
    assert flight.run.cache.pool.num_free == flight.run.cache.pool.num_blocks
    return flight


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_answers_are_the_same_with_a_step_in_flight(first):
    for seed in range(first, first + 20):
        finished(seed)


def test_the_runs_cover_what_can_happen():
    flights = [finished(seed) for seed in range(40)]
    stats = [flight.run.stats for flight in flights]
    codes = [{request.error_code for request in flight.requests} for flight in flights]
    assert sum(item.num_preemptions > 0 for item in stats) > 10
    assert sum(item.num_cached_tokens > 0 for item in stats) > 20
    assert sum(item.num_offloaded_blocks > 0 for item in stats) > 5
    assert sum("non_finite_logits" in found for found in codes) > 5


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 4000, 100))
def test_answers_are_the_same_with_a_step_in_flight_in_many_runs(first):
    for seed in range(first, first + 100):
        finished(seed)
