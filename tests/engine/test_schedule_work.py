"""What a step of scheduling looks at: no more than what has changed, however many requests wait.

Counted are the requests that are looked up in the prefix cache and the tokens that are compared
there: those of each page that is searched for, and of each comparison of two prompts. Batches are
answered as soon as they are scheduled. No model, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from cbgen.engine.cache import search
from cbgen.engine.cache.groups import AttentionSpan
from cbgen.engine.cache.kv_cache import KVCache
from cbgen.engine.cache.prefix import TOKEN_BYTES, PrefixNode
from cbgen.engine.scheduler.scheduler import Scheduler
from cbgen.engine.step import ScheduledBatch
from tests.helpers.engine import answer, make_request, make_scheduler, scheduled_ids
from tests.helpers.shadow_run import ShadowRun, text

MOST_SKIPPED = 64
"""Requests that a step may pass over."""
MOST_PAGES = 4
"""Pages that a look-up searches for beyond those that are known to be common."""


@dataclass
class Work:
    """What has been looked at."""

    num_steps: int = 0
    num_requests: int = 0
    """Look-ups of requests."""
    num_compared_tokens: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    """Ids of the requests that were looked up, and their prompt tokens."""


@pytest.fixture
def work(monkeypatch) -> Work:
    """Count what all caches look at."""
    work = Work()
    match, closest = KVCache.match, PrefixNode.closest

    def counted_match(cache, request, step):
        work.num_requests += 1
        work.seen[request.request_id] = len(request.prompt_ids)
        return match(cache, request, step)

    def counted_closest(node, tokens):
        work.num_compared_tokens += len(tokens) // TOKEN_BYTES
        return closest(node, tokens)

    def counted_common_run(first, second):
        work.num_compared_tokens += min(len(first), len(second)) // TOKEN_BYTES
        return common_run(first, second)

    common_run = search.common_run
    monkeypatch.setattr(KVCache, "match", counted_match)
    monkeypatch.setattr(PrefixNode, "closest", counted_closest)
    monkeypatch.setattr(search, "common_run", counted_common_run)
    return work


def prompts_that_extend_one_another(count: int, num_tokens: int) -> list[list[int]]:
    """Return prompts of which each is the one before it and so many tokens more."""
    whole = text(1, count * num_tokens)
    return [whole[:end] for end in range(num_tokens, len(whole) + 1, num_tokens)]


def prompts_about_a_document(count: int, num_tokens: int) -> list[list[int]]:
    """Return prompts of a document and a question each, sorted as a job sorts them."""
    document = text(1, num_tokens)
    return [[*document, 1 + number // 100, 1 + number % 100, 7] for number in range(count)]


def roomy_scheduler(page_size: int, *, shares_prefixes: bool = True) -> Scheduler:
    """Return one with rows and blocks for every prompt, and steps as on a CPU."""
    return make_scheduler(
        num_blocks=2**18 // page_size,
        page_size=page_size,
        shares_prefixes=shares_prefixes,
        max_batch_tokens=1024,
        max_requests=1024,
        max_context=2**15,
    )


def step(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    scheduler.update(batch, answer(batch))
    return batch


def run(scheduler: Scheduler, prompts: list[list[int]], work: Work) -> Work:
    """Run prompts that all come at once, verify what every step looks at, and return the sum."""
    page_size = scheduler._plan.cache.page_size
    before = replace(work)
    work.seen.clear()
    for number, prompt in enumerate(prompts):
        scheduler.add(make_request(str(number), prompt, max_new_tokens=2))
    while scheduler.has_unfinished():
        num_requests = work.num_requests
        num_admitted = len(step(scheduler).admitted)
        work.num_steps += 1
        assert work.num_requests - num_requests <= num_admitted + MOST_SKIPPED + 1
        # Each prompt once with the one before it, and at most once with the pages of the tree.
        once = sum(work.seen.values())
        searched = MOST_PAGES * page_size * (work.num_requests - before.num_requests)
        assert work.num_compared_tokens - before.num_compared_tokens <= 2 * once + searched
    assert len(scheduler.take_finished()) == len(prompts)
    return Work(
        work.num_steps - before.num_steps,
        work.num_requests - before.num_requests,
        work.num_compared_tokens - before.num_compared_tokens,
    )


@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize(("count", "num_tokens"), [(1500, 2), (600, 1)])
def test_prompts_that_extend_one_another_are_looked_up_a_few_times_each(
    work, page_size, count, num_tokens
):
    prompts = prompts_that_extend_one_another(count, num_tokens)
    totals = run(roomy_scheduler(page_size), prompts, work)
    assert totals.num_requests <= 8 * count


@pytest.mark.parametrize("page_size", [16, 256])
def test_twice_as_many_prompts_that_extend_one_another_take_twice_as_many_look_ups(work, page_size):
    few, many = (
        run(roomy_scheduler(page_size), prompts_that_extend_one_another(count, 2), work)
        for count in (500, 1000)
    )
    assert many.num_requests <= 2.2 * few.num_requests


@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize(("count", "num_tokens"), [(1500, 2), (600, 1)])
def test_prompts_that_extend_one_another_run_many_in_a_step(work, page_size, count, num_tokens):
    prompts = prompts_that_extend_one_another(count, num_tokens)
    shared = run(scheduler := roomy_scheduler(page_size), prompts, work)
    assert shared.num_steps <= count / 10
    num_alone = sum(map(len, prompts))
    assert shared.num_steps <= num_alone / 1024  # without sharing, in full steps
    assert scheduler.stats().num_computed_tokens <= num_alone / 10


@pytest.mark.parametrize("page_size", [16, 256])
def test_prompts_about_a_document_are_compared_with_it_once_each(work, page_size):
    prompts = prompts_about_a_document(200, 20_000)
    totals = run(scheduler := roomy_scheduler(page_size), prompts, work)
    num_tokens = sum(map(len, prompts))
    assert totals.num_compared_tokens <= 1.1 * num_tokens
    assert totals.num_requests <= 3 * len(prompts)
    assert scheduler.stats().num_computed_tokens <= 20_000 + 200 * 3 + 256 + 200


def test_a_request_without_room_is_looked_up_without_a_search(work):
    scheduler = make_scheduler(
        num_blocks=80, shares_prefixes=True, max_requests=8, max_batch_tokens=512, max_context=512
    )
    scheduler.add(make_request("a", text(1, 200), max_new_tokens=100))
    step(scheduler)
    scheduler.add(make_request("same", text(1, 200) + text(2, 120), max_new_tokens=1))
    step(scheduler)
    work.num_compared_tokens = 0
    for _ in range(20):
        assert scheduled_ids(step(scheduler)) == ["a"]
    assert work.num_compared_tokens <= 20 * 4


def test_what_waits_for_a_long_prefix_is_woken_by_it(work):
    """A window makes chunks short, so that steps have tokens left while the prefix is computed."""
    shared = ShadowRun(
        page_size=4,
        num_blocks=340,
        spans=(AttentionSpan(), *[AttentionSpan(window=300)] * 2),
        max_batch_tokens=256,
        max_requests=32,
    )
    assert shared.cache.shape.chunk_tokens < 64
    shared.add(make_request("a", text(1, 400), max_new_tokens=1))
    for number in range(20):
        shared.add(make_request(str(number), [*text(1, 380), 1 + number], max_new_tokens=1))
    assert scheduled_ids(shared.step()) == ["a"]
    work.num_requests = 0
    while shared.scheduler._active["a"].num_computed_tokens < 380:
        assert work.num_requests == 0
        assert scheduled_ids(shared.step()) == ["a"]
    shared.finish()
    assert shared.stats.num_computed_tokens <= 400 + 20 * 2
