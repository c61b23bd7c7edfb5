"""Both backends against a plain float64 computation; slots that nobody wrote hold NaN."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch

from cbgen.engine.attention import base
from cbgen.engine.attention.backends import BACKENDS, backend_class
from cbgen.engine.attention.base import LayerAttention, LayerCache
from cbgen.engine.attention.metadata import AttentionMetadata, causal_mask
from cbgen.engine.cache.groups import AttentionSpan


@dataclass(frozen=True)
class Shape:
    """One layer of one step."""

    requests: tuple[tuple[int, int], ...]
    """(tokens in the cache before the step, new tokens) of each request."""
    num_heads: int = 4
    num_kv_heads: int = 2
    key_dim: int = 8
    value_dim: int = 8
    page_size: int = 4
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    side_by_side: bool = False
    """Whether the blocks of a request lie in order, and are handed over as a slice."""
    has_gaps: bool = False
    """Whether the pages are a view of memory that larger pages share."""

    @property
    def span(self) -> AttentionSpan:
        return AttentionSpan(self.window, self.chunk)


class Step:
    """Random queries, keys and values of a step, and the pages in which the older ones lie."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        self.generator = torch.Generator().manual_seed(seed)
        lengths = [past + new for past, new in shape.requests]
        self.keys = [self.randn(n, shape.num_kv_heads, shape.key_dim) for n in lengths]
        self.values = [self.randn(n, shape.num_kv_heads, shape.value_dim) for n in lengths]
        new_tokens = [new for _, new in shape.requests]
        self.queries = [self.randn(n, shape.num_heads, shape.key_dim) for n in new_tokens]
        sinks = self.randn(shape.num_heads) if shape.has_sinks else None
        self.layer = LayerAttention(1.3 * shape.key_dim**-0.5, None, shape.softcap, sinks)

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator, dtype=torch.float64) * 2

    def run(self, backend_name: str) -> torch.Tensor:
        """Return what the backend answers in float32: [T, num_heads, value_dim]."""
        cache, metadata = self.pages()
        new_keys = [k[-new:] for k, (_, new) in zip(self.keys, self.shape.requests, strict=True)]
        new_values = [
            v[-new:] for v, (_, new) in zip(self.values, self.shape.requests, strict=True)
        ]
        cache.write(
            torch.cat(new_keys).float(), torch.cat(new_values).float(), metadata.slot_mapping
        )
        sinks = None if self.layer.sinks is None else self.layer.sinks.float()
        layer = replace(self.layer, sinks=sinks)
        return backend_class(backend_name)().forward(
            torch.cat(self.queries).float(), cache, metadata, layer
        )

    def pages(self) -> tuple[LayerCache, AttentionMetadata]:
        """Spread requests over shuffled blocks; all slots but those of older tokens hold NaN.

        So do older tokens that no query of the step sees.
        """
        shape, size = self.shape, self.shape.page_size
        counts = [-(-len(keys) // size) for keys in self.keys]
        free = torch.randperm(sum(counts) + 3, generator=self.generator)
        if shape.side_by_side:
            free = torch.arange(len(free))
        tables = list(free[: sum(counts)].split(counts))
        cache = LayerCache(
            self.empty_pages(len(free), shape.key_dim), self.empty_pages(len(free), shape.value_dim)
        )
        slots = []
        for index, (past, _) in enumerate(shape.requests):
            positions = torch.arange(len(self.keys[index]))
            slot = tables[index][positions // size] * size + positions % size
            old = slice(shape.span.first_key(past), past)
            cache.write(self.keys[index][old].float(), self.values[index][old].float(), slot[old])
            slots.append(slot[past:])
        starts = [0]
        for _, new in shape.requests:
            starts.append(starts[-1] + new)
        padded = torch.full((len(tables), max(counts) + 2), 10**12)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        first_keys = [shape.span.first_key(past) for past, _ in shape.requests]
        firsts = [key // size for key in first_keys]
        return cache, AttentionMetadata(
            span=shape.span,
            query_starts=starts,
            key_lens=[len(keys) for keys in self.keys],
            block_tables=padded,
            slot_mapping=torch.cat(slots),
            first_keys=first_keys,
            key_blocks=[
                self.key_blocks(table[first:]) for table, first in zip(tables, firsts, strict=True)
            ],
        )

    def empty_pages(self, num_blocks: int, dim: int) -> torch.Tensor:
        shape = (self.shape.page_size, self.shape.num_kv_heads, dim)
        size = math.prod(shape)
        memory = torch.full((num_blocks, size + 3 if self.shape.has_gaps else size), float("nan"))
        return memory[:, :size].unflatten(1, shape)

    def key_blocks(self, table: torch.Tensor) -> slice | torch.Tensor:
        if self.shape.side_by_side:
            return slice(int(table[0]), int(table[-1]) + 1)
        return table

    def reference(self) -> torch.Tensor:
        """Return the answer by the definition, query by query and head by head, in float64."""
        outputs = []
        group = self.shape.num_heads // self.shape.num_kv_heads
        for queries, keys, values in zip(self.queries, self.keys, self.values, strict=True):
            first = len(keys) - len(queries)
            for offset, query in enumerate(queries):
                position = first + offset
                begin = 0
                if self.shape.window is not None:
                    begin = max(0, position + 1 - self.shape.window)
                if self.shape.chunk is not None:
                    begin = position - position % self.shape.chunk
                seen = slice(begin, position + 1)
                heads = [
                    self.attend(
                        query[head], keys[seen, head // group], values[seen, head // group], head
                    )
                    for head in range(self.shape.num_heads)
                ]
                outputs.append(torch.stack(heads))
        return torch.stack(outputs)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, head: int
    ) -> torch.Tensor:
        scores = keys @ query * self.layer.scaling
        if self.layer.softcap is not None:
            scores = torch.tanh(scores / self.layer.softcap) * self.layer.softcap
        weights = scores.exp()
        total = weights.sum()
        if self.layer.sinks is not None:
            total = total + self.layer.sinks[head].exp()
        return weights @ values / total


def assert_equal_to_the_definition(shape: Shape, backend_name: str, seed: int = 0) -> None:
    step = Step(shape, seed)
    torch.testing.assert_close(
        step.run(backend_name).double(), step.reference(), rtol=1e-5, atol=2e-5
    )


every_backend = pytest.mark.parametrize("backend_name", BACKENDS)
MIXED = ((0, 7), (13, 1), (5, 6), (0, 1), (8, 1), (4, 4))


@every_backend
def test_whole_prompts(backend_name):
    assert_equal_to_the_definition(Shape(((0, 5), (0, 12), (0, 1))), backend_name)


@every_backend
def test_decoding_requests(backend_name):
    assert_equal_to_the_definition(Shape(((3, 1), (4, 1), (17, 1))), backend_name)


@every_backend
def test_chunks_with_a_past(backend_name):
    assert_equal_to_the_definition(Shape(((3, 5), (16, 8), (1, 2))), backend_name)


@every_backend
def test_prompts_chunks_and_decoding_requests_in_one_step(backend_name):
    assert_equal_to_the_definition(Shape(MIXED), backend_name)


@every_backend
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (8, 1), (1, 1)])
def test_heads_that_share_keys(backend_name, num_heads, num_kv_heads):
    shape = Shape(MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads)
    assert_equal_to_the_definition(shape, backend_name)


@every_backend
@pytest.mark.parametrize("page_size", [1, 4, 16, 256])
def test_any_page_size(backend_name, page_size):
    assert_equal_to_the_definition(Shape(MIXED, page_size=page_size), backend_name)


@every_backend
@pytest.mark.parametrize("window", [1, 2, 5, 8, 100])
def test_sliding_windows(backend_name, window):
    assert_equal_to_the_definition(Shape(MIXED, window=window), backend_name)


@every_backend
@pytest.mark.parametrize("chunk", [1, 2, 5, 8, 100])
def test_chunked_attention(backend_name, chunk):
    assert_equal_to_the_definition(Shape(MIXED, chunk=chunk), backend_name)


@every_backend
@pytest.mark.parametrize("spans", [{}, {"window": 5}, {"chunk": 6}])
def test_pages_that_lie_side_by_side(backend_name, spans):
    shape = Shape(MIXED, side_by_side=True, **spans)
    assert_equal_to_the_definition(shape, backend_name)


@every_backend
@pytest.mark.parametrize("side_by_side", [True, False])
def test_pages_that_are_a_view_of_larger_ones(backend_name, side_by_side):
    shape = Shape(MIXED, window=5, has_gaps=True, side_by_side=side_by_side)
    assert_equal_to_the_definition(shape, backend_name)


@every_backend
def test_values_may_be_narrower_than_keys(backend_name):
    assert_equal_to_the_definition(Shape(MIXED, key_dim=24, value_dim=12), backend_name)


@every_backend
@pytest.mark.parametrize("seed", range(12))
def test_random_shapes(backend_name, seed):
    choose = random.Random(seed)
    num_kv_heads = choose.choice([1, 2, 3])
    shape = Shape(
        tuple(
            (
                choose.choice([0, 0, choose.randrange(40)]),
                choose.choice([1, choose.randrange(1, 20)]),
            )
            for _ in range(choose.randrange(1, 9))
        ),
        num_heads=num_kv_heads * choose.choice([1, 2, 4]),
        num_kv_heads=num_kv_heads,
        key_dim=choose.choice([8, 16]),
        page_size=choose.choice([4, 7, 16]),
        **choose.choice(
            [{}, {"window": choose.randrange(1, 20)}, {"chunk": choose.randrange(1, 20)}]
        ),
        has_gaps=choose.choice([True, False]),
    )
    assert_equal_to_the_definition(shape, backend_name, seed)


@pytest.mark.parametrize("softcap", [0.5, 2.0, 50.0])
def test_softcap(softcap):
    assert_equal_to_the_definition(Shape(MIXED, softcap=softcap), "eager")


@pytest.mark.parametrize("spans", [{}, {"window": 3}, {"chunk": 3}])
def test_sinks(spans):
    assert_equal_to_the_definition(Shape(MIXED, has_sinks=True, **spans), "eager")


def test_softcap_sinks_and_window_together():
    shape = Shape(MIXED, has_sinks=True, softcap=1.5, window=6, num_kv_heads=1)
    assert_equal_to_the_definition(shape, "eager")


@every_backend
def test_a_row_is_the_same_alone_and_among_others(backend_name):
    together = Step(Shape(MIXED)).run(backend_name)
    step = Step(Shape(MIXED))
    step.shape = Shape(MIXED[2:3])
    step.keys, step.values, step.queries = step.keys[2:3], step.values[2:3], step.queries[2:3]
    torch.testing.assert_close(step.run(backend_name), together[8:14], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("most_scores", [1, 4 * 19 * 3, 4 * 19 * 7])
@pytest.mark.parametrize("backend_name", BACKENDS)
def test_queries_may_run_in_parts(backend_name, most_scores, monkeypatch):
    monkeypatch.setattr(base, "MOST_SCORES", most_scores)
    shape = Shape(requests=((12, 7), (3, 1), (0, 9)), window=6)
    assert_equal_to_the_definition(shape, backend_name)


def test_layers_of_a_step_share_one_mask():
    step = Step(Shape(((2, 3), (5, 1))))
    cache, metadata = step.pages()
    first = backend_class("sdpa")().forward(
        torch.cat(step.queries).float(), cache, metadata, step.layer
    )
    (mask,) = metadata.masks.values()
    backend_class("sdpa")().forward(torch.cat(step.queries).float(), cache, metadata, step.layer)
    assert list(metadata.masks) == [0]
    assert metadata.masks[0] is mask
    assert first.shape == (4, 4, 8)


def test_a_window_that_the_layer_tells_does_not_bind_a_backend():
    """The probe has made the span out of it, or out of what the layer does not tell."""
    step = Step(Shape(((0, 6),)))
    step.layer = replace(step.layer, sliding_window=2)
    torch.testing.assert_close(step.run("sdpa").double(), step.reference(), rtol=1e-5, atol=2e-5)


def mask_of(span: AttentionSpan, key_start: int = 0) -> list[list[bool]]:
    return causal_mask(2, 4, span, key_start, torch.device("cpu")).tolist()


def test_a_mask_shows_a_query_itself_and_what_came_before():
    assert mask_of(AttentionSpan()) == [[True, True, True, False], [True, True, True, True]]


def test_a_window_counts_the_querys_own_key():
    mask = mask_of(AttentionSpan(window=2))
    assert mask == [[False, True, True, False], [False, False, True, True]]


def test_a_chunk_shows_a_query_nothing_before_it():
    mask = mask_of(AttentionSpan(chunk=3))
    assert mask == [[True, True, True, False], [False, False, False, True]]


def test_a_mask_may_begin_behind_the_first_keys():
    assert mask_of(AttentionSpan(window=2), key_start=1) == [
        [True, True, False],
        [False, True, True],
    ]


@pytest.mark.parametrize("span", [AttentionSpan(), AttentionSpan(window=3), AttentionSpan(chunk=4)])
def test_a_mask_shows_the_keys_of_the_span(span):
    mask = causal_mask(9, 14, span, 0, torch.device("cpu"))
    for position, seen in zip(range(5, 14), mask, strict=True):
        wanted = list(range(span.first_key(position), position + 1))
        assert seen.nonzero().flatten().tolist() == wanted


def test_an_unknown_backend_is_an_error():
    with pytest.raises(KeyError, match="flash"):
        backend_class("flash")()
