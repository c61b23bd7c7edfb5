"""Which host blocks hold the blocks of which preempted request."""

from __future__ import annotations

import pytest

from cbgen.engine.cache.host_pool import HostPool
from cbgen.engine.step import BlockSwap

THREE = [((0, 0), 10), ((0, 1), 11), ((1, 0), 12)]
"""Two logical blocks of a request; the second one has passed the window of group 1."""


def test_a_stored_block_goes_to_a_host_block_of_its_own():
    swaps = HostPool(4).store("a", 7, THREE)
    assert swaps == (BlockSwap(10, 0), BlockSwap(11, 1), BlockSwap(12, 2))


def test_a_copy_tells_what_is_where():
    pool = HostPool(4)
    pool.store("a", 7, THREE)
    copy = pool.find("a")
    assert (copy.num_tokens, copy.blocks) == (7, {(0, 0): 0, (0, 1): 1, (1, 0): 2})


def test_an_unknown_request_has_no_copy():
    assert HostPool(4).find("a") is None


def test_a_request_is_stored_whole_or_not_at_all():
    pool = HostPool(2)
    assert pool.store("a", 7, THREE) is None
    assert pool.find("a") is None
    assert pool.num_free == 2


def test_two_requests_never_have_one_host_block():
    pool = HostPool(6)
    first, second = pool.store("a", 7, THREE), pool.store("b", 7, THREE)
    assert len({swap.host_block for swap in (*first, *second)}) == 6
    assert pool.num_free == 0


def test_free_gives_the_host_blocks_back():
    pool = HostPool(3)
    pool.store("a", 7, THREE)
    pool.free("a")
    assert pool.num_free == 3
    assert pool.store("b", 7, THREE) is not None


def test_free_of_a_request_without_copy_does_nothing():
    pool = HostPool(3)
    pool.free("nobody")
    assert pool.num_free == 3


def test_check_passes_for_requests_that_wait():
    pool = HostPool(4)
    pool.store("a", 7, THREE)
    pool.check(["a", "b"])


def test_check_finds_a_copy_of_a_request_that_does_not_wait():
    pool = HostPool(4)
    pool.store("a", 7, THREE)
    with pytest.raises(AssertionError, match=r"requests that do not wait: \['a'\]"):
        pool.check(["b"])


def test_check_finds_a_host_block_that_was_lost():
    pool = HostPool(4)
    pool._free.pop()
    with pytest.raises(AssertionError, match="lost or held twice"):
        pool.check([])


def test_check_finds_a_host_block_with_two_owners():
    pool = HostPool(6)
    pool.store("a", 7, THREE)
    pool.store("b", 7, THREE)
    pool.find("b").blocks[0, 0] = 0
    with pytest.raises(AssertionError, match="lost or held twice"):
        pool.check(["a", "b"])
