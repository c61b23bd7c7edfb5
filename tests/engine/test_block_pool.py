"""The free list and the reference counts of blocks."""

from __future__ import annotations

import pytest

from cbgen.engine.cache.block_pool import BlockPool


def test_a_new_pool_has_all_blocks_free():
    assert BlockPool(3).num_free == 3


def test_allocated_blocks_are_different_ones():
    pool = BlockPool(5)
    assert sorted(pool.allocate(2) + pool.allocate(3)) == [0, 1, 2, 3, 4]


def test_allocating_nothing_takes_nothing():
    pool = BlockPool(2)
    assert pool.allocate(0) == []
    assert pool.num_free == 2


def test_more_blocks_than_are_free_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="3 blocks wanted, 2 free"):
        BlockPool(2).allocate(3)


def test_a_refused_allocation_takes_nothing():
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="wanted"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check([])


def test_released_blocks_can_be_allocated_again():
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.release(blocks)
    assert sorted(pool.allocate(2)) == sorted(blocks)


def test_a_new_pool_hands_its_blocks_out_in_order():
    assert BlockPool(4).allocate(4) == [0, 1, 2, 3]


def test_blocks_used_before_are_taken_before_those_never_used():
    """A large cache takes memory only as its pages are first written."""
    pool = BlockPool(100)
    used = set()
    for _ in range(30):
        blocks = pool.allocate(3)
        used.update(blocks)
        pool.release(blocks)
    assert len(used) == 3


def test_releasing_a_free_block_names_it():
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="block 3 is released but nobody holds it"):
        pool.release([3])


def test_check_passes_for_the_true_holders():
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(1)
    pool.check([first, second])


def test_check_finds_a_holder_that_was_forgotten():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match=r"reference counts of blocks \[1\]"):
        pool.check([blocks[:1]])


def test_check_finds_a_block_that_two_hold_with_one_reference():
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    with pytest.raises(AssertionError, match="disagree with their holders"):
        pool.check([blocks, blocks])


def test_check_finds_a_block_lost_from_the_free_list():
    pool = BlockPool(4)
    pool._free.pop()
    with pytest.raises(AssertionError, match="free list"):
        pool.check([])


def test_check_finds_a_block_that_is_free_twice():
    pool = BlockPool(4)
    pool._free.append(0)
    with pytest.raises(AssertionError, match="free list"):
        pool.check([])
