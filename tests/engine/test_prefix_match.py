"""What a waiting request finds in the prefix cache, now or after waiting, and what is copied."""

from __future__ import annotations

import pytest

from cbgen.engine.cache.kv_cache import KVCache
from cbgen.engine.cache.prefix import PrefixMatch
from cbgen.engine.request import Request
from cbgen.engine.scheduler.builder import BatchBuilder
from tests.helpers.engine import make_cache, make_request, place

FIRST, SECOND = [1] * 16, [2] * 16


def make_wide_cache(page_size: int = 16, **options) -> KVCache:
    return make_cache(num_blocks=32, page_size=page_size, **options)


def admit(cache: KVCache, request_id: str, prompt: list[int], *, step: int = 1) -> Request:
    request = make_request(request_id, prompt)
    place(cache, request, step)
    return request


def compute(request: Request, num_tokens: int, *, step: int = 1) -> None:
    """Schedule tokens of a request in a step, as schedulers do."""
    BatchBuilder(step, 1000).prefill(request, num_tokens)


def leave_behind(cache: KVCache, prompt: list[int]) -> None:
    """Let the cache keep a prompt whose request has ended."""
    request = admit(cache, "earlier", prompt)
    compute(request, len(prompt) - request.num_computed_tokens)
    cache.free(request)


def look_up(cache: KVCache, prompt: list[int], *, step: int = 2) -> PrefixMatch:
    return cache.match(make_request("later", prompt), step)


def num_found(cache: KVCache, prompt: list[int], *, step: int = 2) -> int:
    return look_up(cache, prompt, step=step).num_tokens(cache.shape)


def test_an_empty_cache_has_nothing():
    assert look_up(make_wide_cache(), FIRST) == PrefixMatch()


def test_a_prompt_is_found_to_its_last_common_token():
    cache = make_wide_cache()
    leave_behind(cache, FIRST + SECOND + [3, 4, 5])
    assert num_found(cache, FIRST + SECOND + [3, 4, 9]) == 34


def test_prompts_that_differ_from_the_first_token_on_share_nothing():
    cache = make_wide_cache()
    leave_behind(cache, FIRST)
    assert num_found(cache, [2, *FIRST]) == 0


def test_the_same_page_behind_another_one_is_not_found():
    cache = make_wide_cache()
    leave_behind(cache, FIRST + SECOND)
    assert num_found(cache, SECOND + FIRST) == 0


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 32, 40])
def test_one_token_is_left_to_compute_of_a_prompt_that_is_all_there(count):
    cache = make_wide_cache()
    prompt = [*range(1, 41)]
    leave_behind(cache, prompt)
    assert num_found(cache, prompt[:count]) == count - 1


def test_the_longest_of_several_beginnings_is_found():
    cache = make_wide_cache()
    for tail in ([3], [4, 5, 6], [4, 5]):
        leave_behind(cache, FIRST + tail)
    assert num_found(cache, [*FIRST, 4, 5, 6, 7]) == 19


def test_whole_pages_are_shared_and_the_rest_is_copied():
    cache = make_wide_cache()
    leave_behind(cache, FIRST + SECOND)
    match = look_up(cache, FIRST + SECOND[:5] + [9])
    assert [node.index for node in match.nodes] == [0]
    assert match.tail_tokens == 5
    assert match.source_blocks == match.tail.blocks


def test_a_cache_that_shares_nothing_finds_nothing():
    cache = make_wide_cache(shares_prefixes=False)
    leave_behind(cache, FIRST + SECOND)
    assert look_up(cache, FIRST + SECOND) == PrefixMatch()


def test_a_page_is_shared_in_the_step_that_computes_it():
    cache = make_wide_cache()
    compute(admit(cache, "now", FIRST + SECOND, step=5), 16, step=5)
    match = look_up(cache, [*FIRST, 9], step=5)
    assert (match.num_tokens(cache.shape), match.must_wait) == (16, False)


def test_a_page_that_is_half_computed_is_waited_for():
    cache = make_wide_cache()
    compute(admit(cache, "now", FIRST + SECOND, step=5), 10, step=5)
    match = look_up(cache, [*FIRST, 9], step=5)
    assert (match.num_tokens(cache.shape), match.must_wait) == (0, True)


def test_a_part_of_a_page_is_not_copied_in_the_step_that_computes_it():
    cache = make_wide_cache()
    compute(admit(cache, "now", FIRST, step=5), 16, step=5)
    match = look_up(cache, [*FIRST[:8], 9], step=5)
    assert (match.num_tokens(cache.shape), match.must_wait) == (0, True)


def test_a_part_of_a_page_is_copied_in_the_step_after():
    cache = make_wide_cache()
    compute(admit(cache, "now", FIRST, step=5), 16, step=5)
    match = look_up(cache, [*FIRST[:8], 9], step=6)
    assert (match.num_tokens(cache.shape), match.must_wait) == (8, False)


def test_a_part_is_copied_while_the_rest_of_the_page_is_computed():
    cache = make_wide_cache()
    owner = admit(cache, "now", FIRST, step=5)
    compute(owner, 8, step=5)
    compute(owner, 8, step=6)
    match = look_up(cache, [*FIRST[:8], 9], step=6)
    assert (match.num_tokens(cache.shape), match.must_wait) == (8, False)


def test_what_was_copied_can_be_copied_again_in_the_same_step_from_where_it_was():
    cache = make_wide_cache()
    leave_behind(cache, FIRST)
    source = look_up(cache, [*FIRST[:8], 9]).source_blocks
    compute(admit(cache, "first copy", [*FIRST[:8], 9, 9], step=5), 2, step=5)
    match = look_up(cache, [*FIRST[:8], 9, 5], step=5)
    assert match.must_wait  # for the 9
    match = look_up(cache, [*FIRST[:8], 5], step=5)
    assert (match.num_tokens(cache.shape), match.source_blocks) == (8, source)


def test_copies_name_source_target_and_length():
    cache = make_wide_cache()
    leave_behind(cache, FIRST + SECOND)
    (source,) = look_up(cache, FIRST + SECOND[:5] + [9]).source_blocks
    placement = place(cache, make_request("later", FIRST + SECOND[:5] + [9]), 2)
    ((copied_from, copied_to, num_tokens),) = placement.copies
    assert (copied_from, copied_to) == (source, cache.block_table("later")[1])
    assert num_tokens == 5
    assert copied_from != copied_to


@pytest.mark.parametrize(("count", "found"), [(3, 0), (4, 4)])
def test_less_than_a_sixteenth_of_a_page_is_not_copied(count, found):
    cache = make_wide_cache(page_size=64)
    leave_behind(cache, [1] * 64)
    assert num_found(cache, [1] * count + [9]) == found


def test_nobody_waits_for_what_would_not_be_copied():
    cache = make_wide_cache(page_size=64)
    admit(cache, "now", [1] * 64)
    assert not look_up(cache, [1, 1, 1, 9]).must_wait
    assert look_up(cache, [1, 1, 1, 1, 9]).must_wait


def test_a_short_page_that_nobody_uses_is_gone_on_in_without_a_copy():
    cache = make_wide_cache()
    leave_behind(cache, [*FIRST, 3, 4])
    (match_block,) = look_up(cache, [*FIRST, 3, 4, 5]).tail.blocks
    request = make_request("later", [*FIRST, 3, 4, 5])
    placement = place(cache, request)
    assert placement.copies == []
    assert request.num_computed_tokens == 18
    assert cache.block_table("later")[1] == match_block


def test_however_short_it_is():
    cache = make_wide_cache(page_size=64)
    leave_behind(cache, [1])
    match = look_up(cache, [1, 2])
    assert (match.num_tokens(cache.shape), match.source_blocks) == (1, [])


def test_a_short_page_in_use_is_copied():
    cache = make_wide_cache()
    compute(admit(cache, "now", [*FIRST, 3, 4], step=1), 18, step=1)
    assert look_up(cache, [*FIRST, 3, 4, 5]).source_blocks == [cache.block_table("now")[1]]


def test_a_short_page_of_which_only_the_beginning_is_wanted_is_copied():
    cache = make_wide_cache()
    leave_behind(cache, [*FIRST, 3, 4])
    match = look_up(cache, [*FIRST, 3, 9])
    assert (match.num_tokens(cache.shape), match.source_blocks) == (17, match.tail.blocks)


def test_only_one_of_two_goes_on_in_a_short_page():
    cache = make_wide_cache()
    leave_behind(cache, [*FIRST, 3, 4])
    compute(admit(cache, "first", [*FIRST, 3, 4, 5], step=2), 1, step=2)
    (kept,) = look_up(cache, [*FIRST, 3, 4, 6], step=2).source_blocks
    second = admit(cache, "second", [*FIRST, 3, 4, 6], step=2)
    assert second.num_computed_tokens == 18
    assert cache.block_table("first")[1] == kept != cache.block_table("second")[1]


def test_a_preempted_request_finds_its_generated_tokens():
    cache = make_wide_cache()
    request = admit(cache, "a", FIRST)
    compute(request, 16)
    request.generated_tokens += [5, 6, 7]
    request.num_tokens, request.num_computed_tokens = 19, 18
    assert cache.grow(request, 17)
    cache.free(request)
    request.preempt()
    assert cache.match(request, 2).num_tokens(cache.shape) == 18


def test_what_is_in_the_host_pool_is_not_waited_for_or_copied():
    cache = make_wide_cache(num_host_blocks=4)
    request = admit(cache, "a", FIRST + SECOND)
    compute(request, 24)
    assert cache.offload(request)
    cache.free(request)
    request.preempt()
    compute(admit(cache, "now", FIRST + SECOND[:8], step=2), 8, step=2)
    match = cache.match(request, 2)
    assert (match.num_tokens(cache.shape), match.tail, match.must_wait) == (16, None, False)


def test_what_comes_back_from_the_host_is_not_copied_in_the_same_step():
    cache = make_wide_cache(num_host_blocks=4)
    request = admit(cache, "a", FIRST)
    compute(request, 12)
    assert cache.offload(request)
    cache.free(request)
    request.preempt()
    cache._tree.clear()  # as if its blocks had been evicted
    place(cache, request, 2)
    compute(request, 4, step=2)
    assert look_up(cache, [*FIRST[:8], 9], step=2).must_wait
    assert num_found(cache, [*FIRST[:8], 9], step=3) == 8
