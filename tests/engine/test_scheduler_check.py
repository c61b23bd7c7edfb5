"""The scheduler's own check finds planted faults."""

from __future__ import annotations

import pytest

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
    scheduler._waiting.popitem()
    with pytest.raises(AssertionError, match="neither waiting nor admitted"):
        scheduler.check()


def test_check_finds_a_request_that_waits_and_runs(scheduler):
    scheduler._waiting["a"] = scheduler._active["a"]
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
