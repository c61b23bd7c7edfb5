"""The scheduler's own check finds planted faults."""

from __future__ import annotations

import pytest

from cbgen.engine.cache.prefix import TOKEN_BYTES
from cbgen.engine.scheduler.policies import FifoScheduler, PrefillFirstScheduler
from cbgen.engine.scheduler.scheduler import Scheduler
from tests.helpers.engine import make_request, make_scheduler, take_step


@pytest.fixture
def scheduler() -> Scheduler:
    """A scheduler with two running requests and one that waits."""
    scheduler = make_scheduler(max_requests=2)
    for name in "abc":
        scheduler.add(make_request(name, 5))
    take_step(scheduler)
    return scheduler


def test_check_finds_a_lost_row(scheduler):
    scheduler._active["a"].row = 7
    with pytest.raises(AssertionError, match="rows are lost or taken twice"):
        scheduler.check()


def test_check_finds_a_request_that_neither_waits_nor_runs(scheduler):
    scheduler._waiting.remove(next(iter(scheduler._waiting)))
    with pytest.raises(AssertionError, match="neither waiting nor admitted"):
        scheduler.check()


def test_check_finds_a_request_that_waits_and_runs(scheduler):
    scheduler._waiting.add(scheduler._active["a"])
    with pytest.raises(AssertionError, match="or both"):
        scheduler.check()


def test_check_finds_more_computed_than_known_tokens(scheduler):
    scheduler._active["a"].num_computed_tokens = 7
    with pytest.raises(AssertionError, match="a has computed more than it knows"):
        scheduler.check()


def test_check_finds_a_wrong_order_of_admission(scheduler):
    scheduler._active["a"].admission = 9
    with pytest.raises(AssertionError, match="order of admission"):
        scheduler.check()


def test_check_finds_blocks_given_back_too_early(scheduler):
    scheduler._cache.free(scheduler._active["a"])
    with pytest.raises(AssertionError, match="block tables and admitted requests differ"):
        scheduler.check()


def test_check_finds_a_lost_count_of_pending_tokens(scheduler):
    scheduler._active["a"].num_pending_tokens = 3
    with pytest.raises(AssertionError, match="a has lost count of its tokens"):
        scheduler.check()


def test_check_finds_a_wrong_sum_of_expected_blocks(scheduler):
    scheduler._admission.expected_blocks += 1
    with pytest.raises(AssertionError, match="expected blocks are not those of the admitted"):
        scheduler.check()


def test_check_finds_a_waiting_request_that_nobody_would_look_at(scheduler):
    scheduler._waiting._ready.clear()
    with pytest.raises(AssertionError, match="a request that waits is lost, or stands twice"):
        scheduler.check()


def test_check_finds_a_waiting_request_that_stands_twice_in_the_queue(scheduler):
    scheduler._waiting._ready.append((9, scheduler._waiting.first()))
    with pytest.raises(AssertionError, match="a request that waits is lost, or stands twice"):
        scheduler.check()


def test_check_finds_pages_that_are_kept_of_a_request_that_runs():
    scheduler = make_scheduler(shares_prefixes=True)
    scheduler.add(make_request("a", 5))
    take_step(scheduler)
    scheduler._cache.match(scheduler._active["a"], 2)
    with pytest.raises(AssertionError, match=r"requests that do not wait: \['a'\]"):
        scheduler.check()


def test_check_finds_a_kept_page_with_other_tokens():
    scheduler = make_scheduler(shares_prefixes=True, max_requests=1)
    for name in "ab":
        scheduler.add(make_request(name, 9))
    take_step(scheduler)
    waiting = scheduler._waiting.first()
    scheduler._cache.match(waiting, 2)
    scheduler.check()
    scheduler._cache._search._found[waiting].tokens = bytes(9 * TOKEN_BYTES)
    with pytest.raises(AssertionError, match="page 0 of b is not found"):
        scheduler.check()


def test_check_finds_a_host_copy_of_a_request_that_is_gone():
    scheduler = make_scheduler(num_host_blocks=2)
    scheduler._cache._host.store("gone", 4, [((0, 0), 3)])
    with pytest.raises(AssertionError, match=r"requests that do not wait: \['gone'\]"):
        scheduler.check()


@pytest.mark.parametrize(
    ("name", "expected"), [("fifo", FifoScheduler), ("prefill_first", PrefillFirstScheduler)]
)
def test_schedulers_are_made_by_name(name, expected):
    assert isinstance(make_scheduler(name), expected)


def test_an_unknown_scheduler_is_refused_by_name():
    with pytest.raises(
        ValueError, match="scheduler_type is 'best'; expected fifo or prefill_first"
    ):
        make_scheduler("best")
