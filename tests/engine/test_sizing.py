"""How many blocks a request takes."""

from __future__ import annotations

import pytest

from cbgen.engine.cache.groups import AttentionSpan, LayerGroup
from cbgen.engine.cache.shape import CacheShape, largest

FULL = AttentionSpan()
SLIDING = AttentionSpan(window=10)
CHUNKED = AttentionSpan(chunk=16)


def make_shape(*spans: AttentionSpan, num_pool_blocks: int = 1000, max_batch_tokens: int = 8):
    groups = tuple(LayerGroup(span, ()) for span in spans)
    return CacheShape(4, groups).sized(num_pool_blocks, max_batch_tokens)


def test_a_request_takes_a_block_a_page_in_every_full_group():
    assert make_shape(FULL, FULL).blocks_for(9) == 2 * 3


def test_a_windowed_group_takes_its_window_and_a_chunk_at_most():
    shape = make_shape(FULL, SLIDING)
    most = -(-(9 + 8) // 4) + 1
    assert shape.blocks_for(9) == 2 * 3
    assert shape.blocks_for(400) == 100 + most
    assert shape.most_blocks == (None, most)


def test_an_average_request_takes_parts_of_blocks():
    assert make_shape(FULL, SLIDING).blocks_for_pages(2.5) == 5.0


def test_chunks_are_short_enough_for_windows_to_fit_in_half_of_the_pool():
    shape = make_shape(FULL, SLIDING, num_pool_blocks=20, max_batch_tokens=512)
    assert shape.window_blocks <= 10
    assert shape.chunk_tokens == 16


def test_chunks_are_never_shorter_than_a_page():
    shape = make_shape(FULL, SLIDING, num_pool_blocks=2, max_batch_tokens=500)
    assert shape.chunk_tokens == 4


def test_the_longest_request_fits_and_one_page_more_does_not():
    shape = make_shape(FULL, SLIDING, CHUNKED, num_pool_blocks=100)
    longest = shape.max_tokens
    assert shape.blocks_for(longest) <= 100 < shape.blocks_for(longest + 1)


@pytest.mark.parametrize("bound", [0, 1, 6, 7, 8])
def test_the_largest_number_that_fits_is_found(bound):
    assert largest(7, lambda number: number <= bound) == min(7, bound)
