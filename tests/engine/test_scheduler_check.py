"""The scheduler's own check finds planted faults."""

from __future__ import annotations

import pytest

from cbgen.engine.scheduler import make_scheduler as scheduler_by_name
from cbgen.engine.scheduler.fifo import FifoScheduler
from tests.helpers.engine import make_cache, make_limits, make_request, make_scheduler, take_step


@pytest.fixture
def scheduler() -> FifoScheduler:
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
    scheduler._waiting.clear()
    with pytest.raises(AssertionError, match="neither waiting nor admitted"):
        scheduler.check()


def test_check_finds_a_request_that_waits_and_runs(scheduler):
    scheduler._waiting.append(scheduler._active["a"])
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
    scheduler._cache.free("a")
    with pytest.raises(AssertionError, match="block tables and admitted requests differ"):
        scheduler.check()


def test_fifo_is_made_by_name():
    assert isinstance(scheduler_by_name("fifo", make_cache(), make_limits()), FifoScheduler)


def test_an_unknown_scheduler_is_refused_by_name():
    with pytest.raises(ValueError, match="scheduler_type is 'best'; expected fifo"):
        scheduler_by_name("best", make_cache(), make_limits())
