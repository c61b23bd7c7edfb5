"""Layer groups that see a window or a chunk hold only the blocks that are still seen."""

from __future__ import annotations

import pytest

from cbgen.engine.cache.groups import AttentionSpan
from tests.helpers.engine import make_cache, make_request, make_shape, place
from tests.helpers.shadow_run import ShadowRun, text

FULL = AttentionSpan()
WINDOW = AttentionSpan(window=7)
CHUNK = AttentionSpan(chunk=16)
MIXED = (FULL, WINDOW)


def seen_keys(span: AttentionSpan, position: int) -> list[int]:
    return list(range(span.first_key(position), position + 1))


def most_blocks(span: AttentionSpan, num_tokens: int, page_size: int = 4) -> int | None:
    """Return the most blocks that a step of so many tokens of a request needs."""
    shape = make_shape(1000, page_size, spans=(span,), max_batch_tokens=num_tokens)
    return shape.most_blocks[0]


@pytest.mark.parametrize("position", [0, 5, 6, 7, 30])
def test_a_window_counts_the_query_itself(position):
    assert len(seen_keys(WINDOW, position)) == min(7, position + 1)


@pytest.mark.parametrize(("position", "first"), [(0, 0), (15, 0), (16, 16), (31, 16), (32, 32)])
def test_a_chunk_begins_at_a_multiple_of_its_length(position, first):
    assert CHUNK.first_key(position) == first


def test_without_window_or_chunk_every_key_is_seen():
    assert FULL.first_key(1000) == 0
    assert most_blocks(FULL, 64) is None


@pytest.mark.parametrize("span", [WINDOW, CHUNK, AttentionSpan(window=1)])
@pytest.mark.parametrize("page_size", [1, 4, 5, 16])
def test_no_step_touches_more_blocks_than_are_held(span, page_size):
    for max_tokens in (1, 3, 16):
        most = most_blocks(span, max_tokens, page_size)
        touched = [
            (start + max_tokens - 1) // page_size - span.first_key(start) // page_size + 1
            for start in range(100)
        ]
        assert max(touched) <= most


def decode_tables(span: AttentionSpan, num_tokens: int, **options) -> list[int]:
    """Run one long answer; return how many blocks the group of that span holds in each step."""
    run = ShadowRun(spans=(FULL, span), **options)
    run.add(make_request("a", text(1, 3), max_new_tokens=num_tokens))
    counts = []
    while run.scheduler.has_unfinished():
        counts.append(len(run.cache.block_table("a", group=1)))
        run.step()
    return counts


@pytest.mark.parametrize("span", [WINDOW, CHUNK])
def test_a_long_answer_holds_a_bounded_number_of_blocks(span):
    most = most_blocks(span, 16)
    assert max(decode_tables(span, 120, max_batch_tokens=16)) <= most


def test_blocks_behind_the_window_are_given_back():
    run = ShadowRun(spans=MIXED, max_batch_tokens=16)
    run.add(make_request("a", text(1, 3), max_new_tokens=60))
    first = run.step().new_blocks[1].block_ids[0]
    assert first in run.cache.block_table("a", group=1)
    for _ in range(10):  # keys 7 to 13 are seen
        run.step()
    assert first not in run.cache.block_table("a", group=1)
    assert len(run.cache.block_table("a", group=0)) == 4


def test_blocks_of_the_last_chunk_are_given_back_when_the_next_begins():
    run = ShadowRun(spans=(CHUNK,), max_batch_tokens=16)
    run.add(make_request("a", text(1, 13), max_new_tokens=60))
    held = [run.step() and run.cache.block_table("a") for _ in range(5)]
    assert held[0] == held[3]  # tokens 0 to 15
    assert not set(held[0]) & set(held[4])


def test_a_window_alone_bounds_what_a_request_may_store():
    run = ShadowRun(spans=(WINDOW,), num_blocks=8, max_batch_tokens=8, max_context=2000)
    (request,) = run.finish(make_request("a", text(1, 120), max_new_tokens=50))
    assert len(request.generated_tokens) == 50
    assert run.stats.peak_used_blocks <= 8


@pytest.mark.parametrize("num_others", [0, 3])
def test_prompts_far_longer_than_window_and_cache_run_in_chunks(num_others):
    run = ShadowRun(spans=(WINDOW,), num_blocks=12, max_batch_tokens=64, max_context=2000)
    requests = [make_request(str(i), text(1 + i, 200), max_new_tokens=3) for i in range(num_others)]
    run.finish(*requests, make_request("long", text(50, 500), max_new_tokens=3))
    assert run.cache.shape.chunk_tokens < 64
    assert run.stats.num_computed_tokens >= 500 + 200 * num_others


def test_a_step_runs_no_more_of_a_prompt_than_windows_have_room_for():
    run = ShadowRun(spans=(WINDOW,), num_blocks=12, max_batch_tokens=64, max_context=2000)
    run.add(make_request("a", text(1, 200)), make_request("b", text(2, 200)))
    counts = [item.num_tokens for _ in range(20) for item in run.step().requests]
    assert max(counts) == run.cache.shape.chunk_tokens
    assert most_blocks(WINDOW, max(counts)) <= 6  # half of the pool


def test_a_request_holds_at_most_what_it_is_said_to_hold():
    run = ShadowRun(spans=MIXED, num_blocks=64, max_batch_tokens=16)
    request = make_request("a", text(1, 60), max_new_tokens=40)
    run.add(request)
    while run.scheduler.has_unfinished():
        run.step()
        assert run.stats.num_used_blocks <= run.cache.shape.blocks_for(request.num_tokens)


def test_the_longest_request_of_a_mixed_cache_fills_it():
    cache = make_cache(num_blocks=10, spans=MIXED, max_batch_tokens=4)
    # 7 blocks for all tokens, and 3 to 4 for the window.
    blocks_for = cache.shape.blocks_for
    assert blocks_for(cache.shape.max_tokens) <= 10 < blocks_for(cache.shape.max_tokens + 1)
    run = ShadowRun(spans=MIXED, num_blocks=10, max_batch_tokens=4, max_requests=4)
    (request,) = run.finish(
        make_request("a", text(1, 3), max_new_tokens=run.cache.shape.max_tokens + 1 - 3)
    )
    assert request.error is None


def remember_and_press(run: ShadowRun, prompt: list[int], num_blocks: int) -> None:
    """Remember a prompt, then let as many of the cached blocks as asked for be evicted."""
    run.remember(prompt)
    before = run.stats.num_evictions
    kind = 60
    while run.stats.num_evictions - before < num_blocks:
        run.finish(make_request(f"cold {kind}", [kind], max_new_tokens=1))
        kind += 1
    assert run.stats.num_evictions - before == num_blocks


def windowed(num_blocks: int = 16) -> ShadowRun:
    return ShadowRun(spans=(WINDOW,), num_blocks=num_blocks, max_batch_tokens=8)


def test_a_prefix_hit_needs_only_what_the_window_sees():
    run = windowed()
    remember_and_press(run, text(1, 40), 6)  # the first six of ten pages
    assert run.num_reused(text(1, 40) + text(2, 5)) == 40


def test_a_prefix_hit_is_cut_where_the_window_misses_a_block():
    run = windowed()
    remember_and_press(run, text(1, 40), 6)
    assert run.num_reused(text(1, 24) + text(2, 5)) == 0


def test_a_prefix_hit_is_cut_to_the_part_that_is_still_there():
    run = windowed()
    run.remember(text(1, 40))
    run.remember(text(1, 12) + text(2, 4))  # uses pages 1 and 2 of the first prompt again
    remember_and_press(run, text(3, 4), 3)
    assert run.num_reused(text(1, 24) + text(4, 5)) == 12


def test_a_prefix_hit_in_a_mixed_cache_needs_both_groups():
    run = ShadowRun(spans=MIXED, num_blocks=64, max_batch_tokens=8)
    run.remember(text(1, 40))
    assert run.num_reused(text(1, 40) + text(2, 5)) == 40
    assert run.num_reused(text(1, 13) + text(3, 5)) == 13


def test_what_a_window_has_passed_is_shared_while_it_is_cached():
    run = ShadowRun(spans=MIXED, num_blocks=64, max_batch_tokens=8)
    run.add(make_request("a", text(1, 40), max_new_tokens=30))
    for _ in range(8):
        run.step()
    assert run.num_reused(text(1, 10) + text(2, 5)) == 10


def test_only_blocks_that_the_window_sees_are_copied():
    run = ShadowRun(spans=MIXED, page_size=8, num_blocks=32, max_batch_tokens=64)
    run.remember(text(1, 30))
    run.add(make_request("b", text(1, 28) + text(2, 5)))
    copies = run.step().block_copies
    assert [copy.num_tokens for copy in copies] == [4, 4]  # one block of each group


def test_a_restored_request_uses_a_prefix_only_as_far_as_its_windows_are_there():
    cache = make_cache(
        9, 8, spans=(FULL, AttentionSpan(window=3)), max_batch_tokens=8, num_host_blocks=8
    )
    prompt = text(1, 40)
    request = make_request("a", prompt)
    place(cache, request)
    request.num_computed_tokens = 9
    assert cache.offload(request)
    cache.free(request)
    request.preempt()
    # Another request computes more of the prompt; its window passes, and the blocks are evicted.
    other = make_request("b", prompt[:30])
    place(cache, other)
    other.num_computed_tokens = 30
    assert cache.grow(other, 29) is not None
    cache.free(other)
    cold = make_request("cold", text(2, 16))
    place(cache, cold)
    cache.free(cold, keep=False)
    # Token 24, which follows the shared pages, would see keys 22 and 23.
    placement = place(cache, request)
    assert request.num_computed_tokens == 9
    assert len(placement.swaps_in) == 4
