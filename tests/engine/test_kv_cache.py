"""Who holds which blocks."""

from __future__ import annotations

import pytest

from tests.helpers.engine import make_cache


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_are_counted_by_started_pages(num_tokens, num_blocks):
    assert make_cache(page_size=4).num_blocks_for(num_tokens) == num_blocks


def test_one_request_can_store_every_slot():
    assert make_cache(num_blocks=3, page_size=16).max_tokens == 48


def test_allocate_returns_the_first_logical_block_and_the_new_blocks():
    cache = make_cache()
    first, blocks = cache.allocate("a", 9)
    assert first == 0
    assert cache.block_table("a") == blocks
    assert len(blocks) == 3


def test_growing_within_the_last_page_takes_no_block():
    cache = make_cache(page_size=4)
    cache.allocate("a", 5)
    assert cache.allocate("a", 8) == (2, ())


def test_growing_over_a_page_border_appends_one_block():
    cache = make_cache(page_size=4)
    _, old = cache.allocate("a", 8)
    first, new = cache.allocate("a", 9)
    assert first == 2
    assert cache.block_table("a") == (*old, *new)


def test_two_requests_never_hold_one_block():
    cache = make_cache(num_blocks=4)
    cache.allocate("a", 8)
    cache.allocate("b", 8)
    assert not set(cache.block_table("a")) & set(cache.block_table("b"))


def test_can_allocate_counts_the_blocks_already_held():
    cache = make_cache(num_blocks=2, page_size=4)
    cache.allocate("a", 4)
    assert cache.can_allocate("a", 8)
    assert not cache.can_allocate("b", 8)


def test_what_can_allocate_denies_allocate_refuses():
    cache = make_cache(num_blocks=2, page_size=4)
    assert not cache.can_allocate("a", 9)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 free"):
        cache.allocate("a", 9)


def test_a_refused_growth_leaves_the_table_as_it_was():
    cache = make_cache(num_blocks=2, page_size=4)
    cache.allocate("a", 8)
    with pytest.raises(ValueError, match="wanted"):
        cache.allocate("a", 9)
    assert len(cache.block_table("a")) == 2


def test_free_gives_every_block_back():
    cache = make_cache(num_blocks=4)
    cache.allocate("a", 16)
    cache.free("a")
    assert cache.num_free_blocks == 4
    assert cache.block_table("a") == ()


def test_blocks_given_back_are_handed_out_in_their_order_again():
    """Blocks that lie side by side are read without a copy."""
    cache = make_cache(num_blocks=8, page_size=4)
    cache.allocate("a", 20)
    cache.free("a")
    cache.allocate("b", 20)
    first = cache.block_table("b")[0]
    assert cache.block_table("b") == tuple(range(first, first + 5))


def test_free_of_an_unknown_request_does_nothing():
    cache = make_cache(num_blocks=4)
    cache.free("nobody")
    assert cache.num_free_blocks == 4


def test_check_passes_for_a_true_state():
    cache = make_cache(page_size=4)
    cache.allocate("a", 8)
    cache.check([("a", 4, 8)])


def test_check_finds_a_table_of_a_request_that_is_gone():
    cache = make_cache()
    cache.allocate("a", 4)
    with pytest.raises(AssertionError, match=r"differ: \['a'\]"):
        cache.check([])


def test_check_finds_an_admitted_request_without_table():
    with pytest.raises(AssertionError, match=r"differ: \['a'\]"):
        make_cache().check([("a", 0, 1)])


def test_check_finds_stored_tokens_without_room():
    cache = make_cache(page_size=4)
    cache.allocate("a", 4)
    with pytest.raises(AssertionError, match="a holds 1 blocks with 5 tokens stored"):
        cache.check([("a", 5, 9)])


def test_check_finds_blocks_beyond_what_is_known():
    cache = make_cache(page_size=4)
    cache.allocate("a", 12)
    with pytest.raises(AssertionError, match="a holds 3 blocks with 4 tokens stored, 4 known"):
        cache.check([("a", 4, 4)])


def test_check_finds_one_block_in_two_tables():
    cache = make_cache(page_size=4)
    cache.allocate("a", 4)
    cache.allocate("b", 4)
    cache._tables["b"] = list(cache._tables["a"])
    with pytest.raises(AssertionError, match="disagree with their holders"):
        cache.check([("a", 4, 4), ("b", 4, 4)])
