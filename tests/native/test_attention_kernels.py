"""Attention of the kernels against float64 by the definition, with every instruction set.

Slots that no query of the step sees hold NaN; entries of block tables beyond them are no blocks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch

from cbgen.engine.attention.base import LayerAttention, LayerCache
from cbgen.engine.attention.cpu import CpuBackend
from cbgen.engine.attention.metadata import AttentionMetadata
from cbgen.engine.cache.groups import AttentionSpan
from cbgen.engine.cpu.native import Kernels

NO_BLOCK = 10**12
FULL = AttentionSpan()


@dataclass(frozen=True)
class Shape:
    """One layer of one step."""

    requests: tuple[tuple[int, int], ...]
    """(tokens in the cache before the step, new tokens) of each request."""
    kv_heads: int = 2
    group: int = 2
    key_dim: int = 32
    value_dim: int = 32
    page_size: int = 16
    span: AttentionSpan = FULL
    softcap: float | None = None
    has_sinks: bool = False
    dtype: torch.dtype = torch.float32
    gap: int = 0
    """Elements between two blocks of the cache."""


def random_shape(seed: int) -> Shape:
    choose = random.Random(seed).choice
    key_dim = choose([8, 32, 40, 64, 80, 96, 128, 256])
    spans = [
        AttentionSpan(window=choose([1, 5, 64, 300])),
        AttentionSpan(chunk=choose([4, 64, 200])),
    ]
    return Shape(
        requests=tuple(
            (choose([0, 0, 10, 63, 64, 200, 255, 256, 257, 600]), choose([1, 1, 1, 2, 17, 50]))
            for _ in range(choose([1, 2, 4]))
        ),
        kv_heads=choose([1, 2, 3]),
        group=choose([1, 2, 3, 4, 5, 7, 8, 16]),
        key_dim=key_dim,
        value_dim=choose([key_dim, key_dim, 16, 24, 64]),
        page_size=choose([1, 3, 16, 64, 256]),
        span=choose([FULL, FULL, *spans]),
        softcap=choose([None, None, 20.0]),
        has_sinks=choose([False, False, True]),
        dtype=choose([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
        gap=choose([0, 0, 24]),
    )


class Step:
    """Random queries, keys and values of a step, and the pages that hold what its queries see."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        self.generator = torch.Generator().manual_seed(seed)
        heads = shape.kv_heads * shape.group
        self.starts = [0]
        for _, new in shape.requests:
            self.starts.append(self.starts[-1] + new)
        self.query = self.randn(self.starts[-1], heads, shape.key_dim)
        lengths = [past + new for past, new in shape.requests]
        self.keys = [
            self.randn(n, shape.kv_heads, shape.key_dim, dtype=shape.dtype) for n in lengths
        ]
        self.values = [
            self.randn(n, shape.kv_heads, shape.value_dim, dtype=shape.dtype) for n in lengths
        ]
        self.layer = LayerAttention(
            1.3 * shape.key_dim**-0.5,
            softcap=shape.softcap,
            sinks=self.randn(heads) if shape.has_sinks else None,
        )
        self._fill_pages()

    def randn(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator).to(dtype)

    def _pages(self, num_blocks: int, dim: int) -> torch.Tensor:
        shape = self.shape
        size = shape.page_size * shape.kv_heads * dim
        memory = torch.full((num_blocks * (size + shape.gap),), float("nan"), dtype=shape.dtype)
        strides = (size + shape.gap, shape.kv_heads * dim, dim, 1)
        return memory.as_strided((num_blocks, shape.page_size, shape.kv_heads, dim), strides)

    def _fill_pages(self) -> None:
        size = self.shape.page_size
        counts = [-(-len(keys) // size) for keys in self.keys]
        num_blocks = sum(counts) + 3
        blocks = list(
            torch.randperm(num_blocks, generator=self.generator)[: sum(counts)].split(counts)
        )
        self.tables = torch.full((len(counts), max(counts) + 2), NO_BLOCK)
        keys = self._pages(num_blocks, self.shape.key_dim)
        values = self._pages(num_blocks, self.shape.value_dim)
        self.cache = LayerCache(keys, values)
        for index, (past, _) in enumerate(self.shape.requests):
            first = self.shape.span.first_key(past)
            positions = torch.arange(first, len(self.keys[index]))
            block = blocks[index][positions // size]
            keys[block, positions % size] = self.keys[index][first:]
            values[block, positions % size] = self.values[index][first:]
            self.tables[index, first // size : counts[index]] = blocks[index][first // size :]

    def metadata(self, starts: list[int], key_lens: list[int], rows: slice) -> AttentionMetadata:
        return AttentionMetadata(
            span=self.shape.span,
            query_starts=starts,
            key_lens=key_lens,
            block_tables=self.tables[rows],
            slot_mapping=torch.empty(0, dtype=torch.int64),
            first_keys=[],
            key_blocks=[],
        )

    def run(self) -> torch.Tensor:
        """Return the output of the whole step: [T, heads, value_dim]."""
        lengths = [past + new for past, new in self.shape.requests]
        metadata = self.metadata(self.starts, lengths, slice(None))
        return CpuBackend().forward(self.query, self.cache, metadata, self.layer)

    def run_one(self, request: int, token: int) -> torch.Tensor:
        """Return the output of one token in a step of its own: [heads, value_dim]."""
        place = self.starts[request] + token
        metadata = self.metadata(
            [0, 1], [self.shape.requests[request][0] + token + 1], slice(request, request + 1)
        )
        query = self.query[place : place + 1]
        return CpuBackend().forward(query, self.cache, metadata, self.layer)[0]

    def reference(self) -> torch.Tensor:
        """Return the output by the definition, in float64."""
        outputs = []
        for index, (past, new) in enumerate(self.shape.requests):
            queries = self.query[self.starts[index] : self.starts[index + 1]].double()
            positions, keys = torch.arange(past, past + new), torch.arange(past + new)
            first = torch.tensor([self.shape.span.first_key(int(p)) for p in positions])
            is_seen = (keys <= positions[:, None]) & (keys >= first[:, None])
            outputs.append(self.attend(queries, index, is_seen))
        return torch.cat(outputs)

    def attend(self, queries: torch.Tensor, index: int, is_seen: torch.Tensor) -> torch.Tensor:
        keys = self.keys[index].double().repeat_interleave(self.shape.group, 1)
        values = self.values[index].double().repeat_interleave(self.shape.group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.layer.scaling
        if self.layer.softcap is not None:
            scores = torch.tanh(scores / self.layer.softcap) * self.layer.softcap
        scores = scores.masked_fill(~is_seen, -torch.inf)
        if self.layer.sinks is not None:
            sinks = self.layer.sinks.double()[:, None, None].expand(-1, len(queries), 1)
            scores = torch.cat([scores, sinks], dim=2)
        weights = torch.softmax(scores, dim=2)[..., : len(keys)]
        return torch.einsum("hqk,khd->qhd", weights, values)


def assert_right(step: Step) -> None:
    torch.testing.assert_close(step.run().double(), step.reference(), rtol=0, atol=5e-6)


@pytest.mark.parametrize("seed", range(20))
def test_a_random_step_is_attended_by_the_definition(kernels: Kernels, seed):
    assert_right(Step(random_shape(seed), seed))


@pytest.mark.parametrize("seed", range(100, 112))
def test_a_token_is_the_same_bits_alone_and_in_any_step(kernels: Kernels, seed):
    step = Step(random_shape(seed), seed)
    output = step.run()
    for request, (_, new) in enumerate(step.shape.requests):
        for token in {0, new // 2, new - 1}:
            alone = step.run_one(request, token)
            assert torch.equal(output[step.starts[request] + token], alone)


def test_a_long_request_is_the_same_bits_on_any_number_of_threads(kernels: Kernels, threads):
    step = Step(Shape(((1500, 1), (20, 40))))
    torch.set_num_threads(1)
    whole = step.run()
    torch.set_num_threads(4)  # enough for the long one to be split over its keys
    assert torch.equal(step.run(), whole)


def test_pages_of_any_size_give_the_same_bits(kernels: Kernels):
    shape = Shape(((300, 1), (70, 5)))
    outputs = [Step(replace(shape, page_size=size)).run() for size in (1, 5, 64, 512)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("past", [0, 1, 15, 62, 63, 64, 254, 255, 256, 511])
def test_lengths_around_the_borders_of_tiles_and_segments(kernels: Kernels, past):
    assert_right(Step(Shape(((past, 1), (past, 3)))))


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 256, 10_000])
def test_windows_around_the_borders_of_tiles(kernels: Kernels, window):
    assert_right(Step(Shape(((320, 4), (0, 130)), span=AttentionSpan(window=window))))


@pytest.mark.parametrize("chunk", [1, 3, 64, 100])
def test_chunks_around_the_borders_of_tiles(kernels: Kernels, chunk):
    assert_right(Step(Shape(((190, 12), (0, 70)), span=AttentionSpan(chunk=chunk))))


@pytest.mark.parametrize("group", [49, 71])
def test_more_heads_share_keys_than_a_task_has_rows(kernels: Kernels, group):
    assert_right(Step(Shape(((70, 3),), kv_heads=1, group=group)))


def test_many_short_requests_are_attended_with_their_heads_side_by_side(kernels: Kernels):
    requests = tuple((length, 1) for length in range(0, 300, 7))
    assert_right(Step(Shape(requests, kv_heads=5, group=3)))


def test_scores_far_apart_do_not_overflow(kernels: Kernels):
    step = Step(Shape(((100, 2),)))
    step.query *= 1000
    assert_right(step)


def test_queries_may_lie_head_by_head(kernels: Kernels):
    step = Step(Shape(((30, 4), (0, 9))))
    output = step.run()
    step.query = step.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(step.run(), output)


def test_bfloat16_queries_get_a_bfloat16_answer(kernels: Kernels):
    step = Step(Shape(((30, 4),), dtype=torch.bfloat16))
    step.query = step.query.bfloat16()
    output = step.run()
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), step.reference(), rtol=0.01, atol=0.01)


def test_what_is_not_a_number_stays_in_its_own_request(kernels: Kernels):
    step = Step(Shape(((80, 2), (80, 2))))
    wanted = step.run()
    step.query[0] = float("nan")
    output = step.run()
    assert bool(output[0].isnan().all())
    assert torch.equal(output[1:], wanted[1:])


def test_a_key_that_is_not_a_number_reaches_the_answer(kernels: Kernels):
    step = Step(Shape(((80, 2),), page_size=128))
    block = int(step.tables[0, 0])
    step.cache.keys[block, 7] = float("nan")
    assert bool(step.run().isnan().all())
