"""What a step costs beside the model: scheduling, bookkeeping of blocks, the search for prefixes.

    python -m pytest -m bench -s benchmarks/bench_scheduler.py

All in Python and on one core, so each microsecond is one in which the device may idle. What is
measured is CPU time: others on the machine do not count. Decoding requests differ in length, so in
every step some of them need a further block.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
from dataclasses import dataclass
from time import thread_time

import pytest

from cbgen.engine.scheduler.scheduler import Scheduler
from cbgen.engine.step import SampledTokens, StepResult
from tests.helpers.engine import answer, make_request, make_scheduler

NUM_STEPS, STEPS_IN_TURN = 320, 40
FEW, MANY = 1_000, 100_000
RUNNING = (1, 32, 256, 1024)
MOST_MICROSECONDS = 2_000
"""Of a step with 1,024 decoding requests and pages of 256 tokens."""
MOST_GROWTH = 1.5
"""How much more a step may cost when the cache knows a hundred times as many blocks."""
VOCAB_SIZE = 50_000
PREFIX_TOKENS = {16: 160, 256: 12}
"""Tokens of each cached prompt: ten blocks of 16, or one of 256 that is filled in part."""
TOKEN = SampledTokens((7,))


@dataclass(frozen=True)
class StepCost:
    """Microseconds a step: median of both parts, median and mean of their sum."""

    schedule: float
    update: float
    median: float
    mean: float


def tokens(choose: random.Random, count: int) -> list[int]:
    return [choose.randrange(VOCAB_SIZE) for _ in range(count)]


def make_filled_scheduler(page_size: int, num_cached: int) -> Scheduler:
    """Return a scheduler with room for 1,024 requests beside so many cached blocks."""
    choose = random.Random(page_size)
    blocks_a_request = -(-(page_size + 64 + NUM_STEPS) // page_size) + 1
    scheduler = make_scheduler(
        num_blocks=num_cached + 1024 * blocks_a_request,
        page_size=page_size,
        shares_prefixes=True,
        max_batch_tokens=8192,
        max_requests=1024,
        max_context=100_000,
        vocab_size=VOCAB_SIZE,
    )
    number = 0
    while scheduler._cache.pool.num_cached < num_cached:
        for _ in range(32):
            prompt = tokens(choose, PREFIX_TOKENS[page_size])
            scheduler.add(make_request(str(number), prompt, max_new_tokens=1))
            number += 1
        while scheduler.has_unfinished():
            batch = scheduler.schedule()
            scheduler.update(batch, answer(batch))
        scheduler.take_finished()
    return scheduler


def start(scheduler: Scheduler, page_size: int, count: int) -> None:
    """Let requests run that reach their page borders in different steps."""
    choose = random.Random(count)
    for number in range(count):
        prompt = tokens(choose, 32 + number % page_size)
        scheduler.add(make_request(f"running {number}", prompt, max_new_tokens=10_000))
    num_decoding = 0
    while num_decoding < count:
        batch = scheduler.schedule()
        scheduler.update(batch, answer(batch))
        num_decoding = sum(item.num_samples for item in batch.requests)


def say(line: str) -> None:
    sys.stderr.write(line + "\n")


def stop(scheduler: Scheduler) -> None:
    for request in scheduler.unfinished():
        scheduler.cancel(request.request_id)
    scheduler.take_finished()


def take_step(scheduler: Scheduler, count: int) -> tuple[float, float]:
    """Return the seconds of `schedule` and `update` in a step of `count` decoding requests."""
    begin = thread_time()
    batch = scheduler.schedule()
    scheduled = thread_time()
    result = StepResult((TOKEN,) * len(batch.requests))
    returned = thread_time()
    scheduler.update(batch, result)
    updated = thread_time()
    assert len(batch.requests) == count
    return scheduled - begin, updated - returned


def measure_steps(schedulers: list[Scheduler], count: int) -> list[StepCost]:
    """Measure schedulers in turn, some steps each, so that what else runs disturbs them alike."""
    parts: list[list[tuple[float, float]]] = [[] for _ in schedulers]
    for _ in range(0, NUM_STEPS, STEPS_IN_TURN):
        for scheduler, taken in zip(schedulers, parts, strict=True):
            taken += [take_step(scheduler, count) for _ in range(STEPS_IN_TURN)]
    return [step_cost(taken) for taken in parts]


def step_cost(parts: list[tuple[float, float]]) -> StepCost:
    sums = [1e6 * sum(pair) for pair in parts]
    schedule, update = (1e6 * statistics.median(part) for part in zip(*parts, strict=True))
    return StepCost(schedule, update, statistics.median(sums), statistics.mean(sums))


def measure_admission(scheduler: Scheduler) -> tuple[float, float]:
    """Return the median microseconds to look up and to admit a prompt of 512 tokens."""
    cache, choose = scheduler._cache, random.Random(3)
    parts: list[tuple[float, float]] = []
    earlier = tokens(choose, 512)
    for number in range(NUM_STEPS):
        # Alternately a prompt of which half is there, and one that shares nothing.
        prompt = earlier[:256] + tokens(choose, 256) if number % 2 else tokens(choose, 512)
        request = make_request("looked up", prompt)
        begin = thread_time()
        match = cache.match(request, number)
        found = thread_time()
        cache.admit(request, match, number)
        parts.append((found - begin, thread_time() - found))
        request.num_computed_tokens = 512
        cache.free(request)
        earlier = prompt
    match_time, admit_time = (1e6 * statistics.median(part) for part in zip(*parts, strict=True))
    return match_time, admit_time


@pytest.mark.bench
@pytest.mark.parametrize("page_size", [256, 16])
def test_a_step_costs_little_however_much_is_cached(page_size):
    """Under 2 ms with 1,024 requests, and at most 1.5 times as much with 100,000 cached blocks."""
    schedulers = [make_filled_scheduler(page_size, num_cached) for num_cached in (FEW, MANY)]
    costs: dict[int, list[StepCost]] = {}
    say(f"\npages of {page_size} tokens: microseconds a step")
    say("running   cached  schedule  update  median    mean")
    for count in RUNNING:
        for scheduler in schedulers:
            start(scheduler, page_size, count)
        gc.collect()
        costs[count] = measure_steps(schedulers, count)
        for num_cached, cost in zip((FEW, MANY), costs[count], strict=True):
            say(
                f"{count:7} {num_cached:8} {cost.schedule:9.0f} {cost.update:7.0f} "
                f"{cost.median:7.0f} {cost.mean:7.0f}"
            )
        for scheduler in schedulers:
            stop(scheduler)
    for few, many in costs.values():
        assert many.median <= MOST_GROWTH * few.median
    if page_size == 256:
        assert all(cost.median < MOST_MICROSECONDS for cost in costs[1024])
        assert all(cost.mean < MOST_MICROSECONDS for cost in costs[1024])


@pytest.mark.bench
@pytest.mark.parametrize("page_size", [256, 16])
def test_an_admission_costs_little_however_much_is_cached(page_size):
    say(f"\npages of {page_size} tokens: microseconds for a prompt of 512 tokens")
    costs = []
    for num_cached in (FEW, MANY):
        scheduler = make_filled_scheduler(page_size, num_cached)
        match_time, admit_time = measure_admission(scheduler)
        say(f"{num_cached:7} cached: match {match_time:.0f}, admit {admit_time:.0f}")
        costs.append(match_time + admit_time)
    few, many = costs
    assert many <= MOST_GROWTH * few
