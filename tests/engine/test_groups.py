"""Which keys a query sees, and how layers are sorted into groups of equal blocks."""

from __future__ import annotations

import pytest

from cbgen.engine.cache.groups import AttentionSpan, LayerFacts, group_layers, layers_by_place
from cbgen.engine.cache.shape import CacheShape
from tests.helpers.engine import make_shape


def layer(
    index: int, window: int | None = None, chunk: int | None = None, dim: int = 8
) -> LayerFacts:
    return LayerFacts(index, 4, 2, dim, dim, AttentionSpan(window, chunk))


def pattern(num_sliding: int, num_full: int) -> list[LayerFacts]:
    """Return layers in repeated order, as models have them: some sliding ones, then a full one."""
    layers = [layer(index, window=16) for index in range(num_sliding)]
    return [*layers, *(layer(num_sliding + index) for index in range(num_full))]


SPANS = [AttentionSpan(), AttentionSpan(window=1), AttentionSpan(window=5), AttentionSpan(chunk=4)]


def test_a_full_query_sees_all_earlier_keys():
    assert [AttentionSpan().first_key(position) for position in (0, 7, 1000)] == [0, 0, 0]


def test_a_window_counts_the_querys_own_key():
    span = AttentionSpan(window=3)
    assert [span.first_key(position) for position in range(6)] == [0, 0, 0, 1, 2, 3]


def test_a_chunk_begins_at_its_multiple():
    span = AttentionSpan(chunk=3)
    assert [span.first_key(position) for position in range(7)] == [0, 0, 0, 3, 3, 3, 6]


@pytest.mark.parametrize("span", SPANS)
def test_a_key_once_forgotten_is_never_seen_again(span):
    firsts = [span.first_key(position) for position in range(40)]
    assert firsts == sorted(firsts)
    assert all(first <= position for position, first in enumerate(firsts))


@pytest.mark.parametrize("span", SPANS[1:])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 20])
def test_no_step_needs_more_blocks_than_the_bound(span, page_size, num_tokens):
    needed = [
        -(-(start + num_tokens) // page_size) - span.first_key(start) // page_size
        for start in range(60)
    ]
    (bound,) = make_shape(1000, page_size, spans=(span,), max_batch_tokens=num_tokens).most_blocks
    assert bound is not None
    assert max(needed) <= bound <= max(needed) + 1


def test_full_attention_has_no_bound():
    assert make_shape().most_blocks == (None,)
    assert AttentionSpan().is_full
    assert not AttentionSpan(window=4).is_full
    assert not AttentionSpan(chunk=4).is_full


def test_layers_of_one_kind_are_one_group():
    (group,) = group_layers([layer(index) for index in range(5)])
    assert group.span == AttentionSpan()
    assert [each.index for each in group.layers] == [0, 1, 2, 3, 4]


def test_layers_of_different_kinds_are_in_different_groups():
    groups = group_layers([layer(0, window=8), layer(1), layer(2, chunk=8), layer(3, window=9)])
    assert {tuple(group.span) for group in groups} == {
        (8, None),
        (None, None),
        (None, 8),
        (9, None),
    }
    for group in groups:
        assert {each.span for each in group.layers} == {group.span}


@pytest.mark.parametrize(
    ("num_sliding", "num_full", "sizes"),
    [
        (12, 12, [12, 12]),
        (5, 1, [1] * 6),
        (10, 2, [2] * 6),
        (22, 4, [4, 4, 4, 4, 3, 3, 4]),
        (12, 13, [12, 13]),
        (36, 12, [12, 12, 12, 12]),
    ],
)
def test_kinds_are_split_into_groups_of_about_one_size(num_sliding, num_full, sizes):
    groups = group_layers(pattern(num_sliding, num_full))
    assert [len(group.layers) for group in groups] == sizes


@pytest.mark.parametrize("num_sliding", range(1, 40, 3))
@pytest.mark.parametrize("num_full", [1, 3, 8, 17])
def test_every_layer_is_in_one_group_and_little_is_wasted(num_sliding, num_full):
    layers = pattern(num_sliding, num_full)
    groups = group_layers(layers)
    found = [each.index for group in groups for each in group.layers]
    assert sorted(found) == [each.index for each in layers]
    slots = len(groups) * max(len(group.layers) for group in groups)
    assert len(layers) / slots >= 0.9


def test_a_block_is_a_page_in_each_layer_of_a_group():
    layers = [layer(index, dim=8) for index in range(3)]
    assert CacheShape(16, group_layers(layers), dtype="bfloat16").block_bytes == 3 * 16 * 2 * 2 * 16


def test_a_block_takes_the_largest_page_at_each_place():
    groups = group_layers([layer(0, window=4, dim=8), layer(1, dim=32)])
    assert CacheShape(1, groups, dtype="float32").block_bytes == 2 * (32 + 32) * 4


def test_keys_and_values_are_counted_apart():
    wide_keys = LayerFacts(0, 4, 1, key_dim=10, value_dim=2, span=AttentionSpan(4))
    wide_values = LayerFacts(1, 4, 1, key_dim=3, value_dim=8)
    assert (
        CacheShape(1, group_layers([wide_keys, wide_values]), dtype="float8").block_bytes == 10 + 8
    )


def test_large_pages_of_two_kinds_stand_at_the_same_place():
    dims = (8, 32)
    layers = [layer(index, window=4, dim=dims[index % 2]) for index in range(4)]
    layers += [layer(4 + index, dim=dims[1 - index % 2]) for index in range(4)]
    for together in layers_by_place(group_layers(layers)):
        assert len({each.key_dim for each in together}) == 1
