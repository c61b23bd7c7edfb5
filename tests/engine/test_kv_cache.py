"""Who holds which blocks."""

from __future__ import annotations

import pytest

from cbgen.engine.cache.kv_cache import KVCache
from cbgen.engine.request import Request
from tests.helpers.engine import make_cache, make_request, place


def private_cache(num_blocks: int = 8, page_size: int = 4) -> KVCache:
    """Return a cache whose requests share nothing."""
    return make_cache(num_blocks, page_size, shares_prefixes=False)


def placed(cache: KVCache, request_id: str, num_tokens: int) -> Request:
    request = make_request(request_id, num_tokens)
    place(cache, request)
    return request


def extended(cache: KVCache, request: Request, num_tokens: int) -> list | None:
    """Let a request know `num_tokens` tokens, all but one stored, and ask for room for them."""
    request.num_tokens = num_tokens
    request.num_computed_tokens = num_tokens - 1
    return cache.grow(request, num_tokens - 1)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_are_counted_by_started_pages(num_tokens, num_blocks):
    assert make_cache(page_size=4).shape.blocks_for(num_tokens) == num_blocks


def test_one_request_can_store_every_slot():
    assert make_cache(num_blocks=3, page_size=16).shape.max_tokens == 48


def test_admission_gives_blocks_for_all_known_tokens():
    cache = private_cache()
    ((_, group, first, blocks),) = place(cache, make_request("a", 9)).blocks
    assert (group, first, len(blocks)) == (0, 0, 3)
    assert cache.block_table("a") == blocks


def test_admission_tells_how_much_room_there_is():
    assert placed(private_cache(page_size=4), "a", 9).num_slots == 12


def test_growing_within_the_last_page_takes_no_block():
    cache = private_cache(page_size=4)
    request = placed(cache, "a", 5)
    assert extended(cache, request, 8) == []
    assert request.num_slots == 8


def test_growing_over_a_page_border_appends_one_block():
    cache = private_cache(page_size=4)
    request = placed(cache, "a", 8)
    old = cache.block_table("a")
    ((_, _, first, new),) = extended(cache, request, 9)
    assert first == 2
    assert cache.block_table("a") == (*old, *new)
    assert request.num_slots == 12


def test_two_requests_that_share_nothing_never_hold_one_block():
    cache = private_cache(num_blocks=4)
    placed(cache, "a", 8)
    placed(cache, "b", 8)
    assert not set(cache.block_table("a")) & set(cache.block_table("b"))


def test_what_can_admit_denies_admit_refuses():
    cache = private_cache(num_blocks=2, page_size=4)
    request = make_request("a", 9)
    match = cache.match(request, step=1)
    assert not cache.can_admit(request, match)
    with pytest.raises(ValueError, match="not enough blocks are free for a"):
        cache.admit(request, match, step=1)


def test_a_refused_admission_takes_nothing():
    cache = private_cache(num_blocks=2, page_size=4)
    request = make_request("a", 9)
    with pytest.raises(ValueError, match="not enough blocks"):
        cache.admit(request, cache.match(request, step=1), step=1)
    assert cache.pool.num_free == 2
    cache.check([], [])


def test_can_admit_counts_the_blocks_that_others_hold():
    cache = private_cache(num_blocks=3, page_size=4)
    placed(cache, "a", 8)
    small, large = make_request("small", 4), make_request("large", 8)
    assert cache.can_admit(small, cache.match(small, step=1))
    assert not cache.can_admit(large, cache.match(large, step=1))


def test_a_refused_growth_leaves_the_table_as_it_was():
    cache = private_cache(num_blocks=2, page_size=4)
    request = placed(cache, "a", 8)
    assert extended(cache, request, 9) is None
    assert len(cache.block_table("a")) == 2
    assert request.num_slots == 8


@pytest.mark.parametrize("shares_prefixes", [False, True])
def test_free_gives_every_block_back(shares_prefixes):
    cache = make_cache(num_blocks=4, shares_prefixes=shares_prefixes)
    cache.free(placed(cache, "a", 16))
    assert cache.pool.num_free == 4
    assert cache.block_table("a") == ()


@pytest.mark.parametrize("shares_prefixes", [False, True])
def test_blocks_given_back_are_handed_out_in_their_order_again(shares_prefixes):
    """Blocks that lie side by side are read without a copy."""
    cache = make_cache(num_blocks=5, page_size=4, shares_prefixes=shares_prefixes)
    first = placed(cache, "a", 20)
    first.num_computed_tokens = 20
    cache.free(first)
    place(cache, make_request("b", [100] * 20))
    assert cache.block_table("b") == (0, 1, 2, 3, 4)


def test_free_of_a_request_that_holds_nothing_does_nothing():
    cache = make_cache(num_blocks=4)
    cache.free(make_request("nobody"))
    assert cache.pool.num_free == 4


def test_check_passes_for_a_true_state():
    cache = make_cache(page_size=4)
    cache.check([placed(cache, "a", 8)], [])


def test_check_finds_a_table_of_a_request_that_is_gone():
    cache = make_cache()
    placed(cache, "a", 4)
    with pytest.raises(AssertionError, match=r"differ: \['a'\]"):
        cache.check([], [])


def test_check_finds_an_admitted_request_without_table():
    with pytest.raises(AssertionError, match=r"differ: \['a'\]"):
        make_cache().check([make_request("a", 1)], [])


def test_check_finds_stored_tokens_without_room():
    cache = make_cache(page_size=4)
    request = placed(cache, "a", 4)
    request.num_computed_tokens, request.num_tokens = 5, 9
    with pytest.raises(AssertionError, match="a holds 1 blocks with 5 tokens stored, 9 known"):
        cache.check([request], [])


def test_check_finds_blocks_beyond_what_is_known():
    cache = make_cache(page_size=4)
    request = placed(cache, "a", 12)
    request.num_tokens = 4
    with pytest.raises(AssertionError, match="a holds 3 blocks with 0 tokens stored, 4 known"):
        cache.check([request], [])


def test_check_finds_a_wrong_count_of_slots():
    cache = make_cache(page_size=4)
    request = placed(cache, "a", 4)
    request.num_slots = 8
    with pytest.raises(AssertionError, match="a has 0 tokens stored and 8 slots"):
        cache.check([request], [])


def test_check_finds_one_block_in_two_tables():
    cache = private_cache(page_size=4)
    first, second = placed(cache, "a", 4), placed(cache, "b", 4)
    cache._sequences["b"].nodes[0].blocks[0] = cache.block_table("a")[0]
    with pytest.raises(AssertionError, match="disagree with their holders"):
        cache.check([first, second], [])
