"""The states of blocks: in use, cached, empty; and who is evicted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cbgen.engine.cache.block_pool import BlockPool


def pool_with_cached(
    count: int, on_evict: Callable[[int], None] = lambda _: None
) -> tuple[BlockPool, list[int]]:
    """Return a pool of cached blocks alone, and those, longest released first."""
    pool = BlockPool(count, on_evict)
    blocks = pool.allocate(count)
    for block in blocks:
        pool.release(block, keep=True)
    return pool, blocks


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
    pool.check([], [])


def test_a_refused_allocation_evicts_nothing():
    pool, blocks = pool_with_cached(2)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    pool.check([], blocks)


def test_released_blocks_can_be_allocated_again():
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    for block in blocks:
        pool.release(block)
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
        for block in blocks:
            pool.release(block)
    assert len(used) == 3


def test_releasing_a_free_block_names_it():
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="block 3 is released but nobody holds it"):
        pool.release(3)


def test_a_block_is_free_only_when_its_last_holder_has_released_it():
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.acquire(block)
    pool.release(block)
    assert not pool.is_free(block)
    pool.release(block)
    assert pool.is_free(block)


def test_a_kept_block_counts_as_free():
    pool, _ = pool_with_cached(2)
    assert (pool.num_cached, pool.num_free) == (2, 2)


def test_a_kept_block_can_be_acquired_again():
    pool, blocks = pool_with_cached(2)
    pool.acquire(blocks[0])
    assert (pool.num_cached, pool.num_free) == (1, 1)
    pool.check([[blocks[0]]], blocks)


def test_acquiring_an_empty_block_names_it():
    with pytest.raises(ValueError, match="block 1 is acquired but holds nothing"):
        BlockPool(2).acquire(1)


def test_nothing_is_evicted_while_a_block_is_empty():
    pool = BlockPool(3)
    cached = pool.allocate(2)
    for block in cached:
        pool.release(block, keep=True)
    assert not set(pool.allocate(1)) & set(cached)
    assert (pool.num_evictions, pool.num_cached) == (0, 2)


def test_one_block_is_evicted_at_a_time():
    pool, _ = pool_with_cached(5)
    pool.allocate(1)
    assert (pool.num_evictions, pool.num_cached) == (1, 4)


def test_the_block_released_longest_ago_is_evicted_first():
    evicted = []
    pool, blocks = pool_with_cached(3, evicted.append)
    pool.allocate(2)
    assert evicted == blocks[:2]


def test_a_block_that_was_used_again_is_evicted_last():
    evicted = []
    pool, blocks = pool_with_cached(3, evicted.append)
    pool.acquire(blocks[0])
    pool.release(blocks[0], keep=True)
    pool.allocate(3)
    assert evicted == [blocks[1], blocks[2], blocks[0]]


def test_a_touched_block_counts_as_just_used():
    evicted = []
    pool, blocks = pool_with_cached(3, evicted.append)
    pool.touch(blocks[0])
    pool.allocate(3)
    assert evicted == [blocks[1], blocks[2], blocks[0]]


def test_touching_a_block_in_use_does_nothing():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.touch(blocks[0])
    pool.check([blocks], [])


def test_blocks_discarded_during_an_eviction_are_used_before_others_are_evicted():
    evicted = []

    def evict(block: int) -> None:
        evicted.append(block)
        pool.discard(blocks[2])

    pool, blocks = pool_with_cached(3, evict)
    assert sorted(pool.allocate(2)) == sorted([blocks[0], blocks[2]])
    assert evicted == [blocks[0]]


def test_discarding_a_block_in_use_does_nothing():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.discard(blocks[0])
    pool.check([blocks], [])


def test_check_passes_for_the_true_holders():
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(1)
    pool.check([first, second], first)


def test_check_finds_a_holder_that_was_forgotten():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match=r"reference counts of blocks \[1\]"):
        pool.check([blocks[:1]], [])


def test_check_finds_a_block_that_two_hold_with_one_reference():
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    with pytest.raises(AssertionError, match="disagree with their holders"):
        pool.check([blocks, blocks], [])


def test_check_finds_a_block_lost_from_the_free_list():
    pool = BlockPool(4)
    pool._empty.pop()
    with pytest.raises(AssertionError, match="free blocks disagree"):
        pool.check([], [])


def test_check_finds_a_block_that_is_free_twice():
    pool = BlockPool(4)
    pool._empty.append(0)
    with pytest.raises(AssertionError, match="free blocks disagree"):
        pool.check([], [])


def test_check_finds_a_block_kept_for_nobody():
    pool, blocks = pool_with_cached(2)
    with pytest.raises(AssertionError, match=r"blocks \[1\] are cached for nobody, or lost"):
        pool.check([], blocks[:1])


def test_check_finds_a_block_that_is_wanted_and_was_not_kept():
    with pytest.raises(AssertionError, match=r"blocks \[0\] are cached for nobody, or lost"):
        BlockPool(2).check([], [0])
