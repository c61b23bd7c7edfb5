"""Attention to keys that requests share, against the same keys in blocks of their own.

A step whose tables hold the same blocks must give the bits of a step where nobody shares any.
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
    """Requests by the branches of a tree of prefixes that they descend from."""

    requests: tuple[tuple[tuple[int, ...], int, int], ...]
    """(branch taken after each `branch_pages` pages, keys, queries) of each request."""
    branch_pages: int
    page_size: int = 64
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 32
    span: AttentionSpan = FULL
    has_sinks: bool = False
    dtype: torch.dtype = torch.float32


class Step:
    """The pages of a step, with blocks of shared prefixes once."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        blocks: dict[tuple[object, ...], int] = {}
        tables = []
        for number, (branches, keys, _) in enumerate(shape.requests):
            table = []
            for page in range(-(-keys // shape.page_size)):
                path = branches[: page // shape.branch_pages + 1]
                # Behind the last branch, and where a page is not full, a request is alone.
                depth = page // shape.branch_pages
                is_whole = (page + 1) * shape.page_size <= keys
                is_shared = depth < len(branches) and is_whole
                name = (path, page) if is_shared else (number, page)
                table.append(blocks.setdefault(name, len(blocks)))
            tables.append(table)
        size = (len(blocks), shape.page_size, shape.kv_heads, shape.head_dim)
        self.cache = LayerCache(
            torch.randn(size, generator=generator).to(shape.dtype),
            torch.randn(size, generator=generator).to(shape.dtype),
        )
        self.tables = torch.full((len(tables), max(map(len, tables))), NO_BLOCK)
        for row, table in zip(self.tables, tables, strict=True):
            row[: len(table)] = torch.tensor(table)
        self.num_queries = [queries for _, _, queries in shape.requests]
        heads = shape.kv_heads * shape.group
        self.query = torch.randn(sum(self.num_queries), heads, shape.head_dim, generator=generator)
        sinks = torch.randn(heads, generator=generator) if shape.has_sinks else None
        self.layer = LayerAttention(shape.head_dim**-0.5, sinks=sinks)

    def with_blocks_of_its_own(self) -> LayerCache:
        """Give every request copies of its blocks; return the cache that holds them."""
        is_block = self.tables != NO_BLOCK
        from_blocks = self.tables[is_block]
        self.tables[is_block] = torch.arange(len(from_blocks))
        return LayerCache(self.cache.keys[from_blocks], self.cache.values[from_blocks])

    def run(self, cache: LayerCache) -> torch.Tensor:
        starts = [0]
        for count in self.num_queries:
            starts.append(starts[-1] + count)
        metadata = AttentionMetadata(
            span=self.shape.span,
            query_starts=starts,
            key_lens=[keys for _, keys, _ in self.shape.requests],
            block_tables=self.tables,
            slot_mapping=torch.empty(0, dtype=torch.int64),
            first_keys=[],
            key_blocks=[],
        )
        return CpuBackend().forward(self.query, cache, metadata, self.layer)


def assert_same_bits(step: Step) -> None:
    shared = step.run(step.cache)
    assert torch.equal(shared, step.run(step.with_blocks_of_its_own()))


def random_shape(seed: int) -> Shape:
    choose = random.Random(seed).choice
    page_size = choose([1, 16, 48, 64, 256, 512])
    branch_pages = max(1, choose([128, 256, 300, 520]) // page_size)
    spans = [AttentionSpan(window=choose([5, 300, 700])), AttentionSpan(chunk=choose([64, 512]))]
    return Shape(
        requests=tuple(
            (
                tuple(choose([0, 0, 1]) for _ in range(choose([0, 1, 2, 3]))),
                choose([2, 255, 256, 257, 600, 1030]),
                choose([1, 1, 1, 2]),
            )
            for _ in range(choose([2, 5, 40]))
        ),
        branch_pages=branch_pages,
        page_size=page_size,
        kv_heads=choose([1, 2, 3]),
        group=choose([1, 3, 4, 8, 32, 50]),
        head_dim=choose([32, 64, 40]),
        span=choose([FULL, FULL, *spans]),
        has_sinks=choose([False, True]),
        dtype=choose([torch.float32, torch.float32, torch.bfloat16]),
    )


@pytest.mark.parametrize("seed", range(24))
def test_a_random_tree_of_prefixes_gives_the_same_bits(kernels: Kernels, seed):
    assert_same_bits(Step(random_shape(seed), seed))


ONE_PROMPT = Shape((((0, 0), 700, 1),) * 37, branch_pages=4)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_many_requests_of_one_prompt(kernels: Kernels, threads, num_threads):
    torch.set_num_threads(num_threads)
    assert_same_bits(Step(ONE_PROMPT))


def test_a_request_whose_keys_end_with_the_shared_segment(kernels: Kernels):
    requests = (((0,), 256, 1), ((0,), 256, 1), ((0,), 300, 1))
    assert_same_bits(Step(Shape(requests, branch_pages=4)))


def test_keys_of_its_own_are_split_while_others_are_shared(kernels: Kernels, threads):
    torch.set_num_threads(4)
    requests = (((0,), 3000, 1), ((0,), 300, 1), ((0,), 290, 1))
    assert_same_bits(Step(Shape(requests, branch_pages=4)))


def test_a_segment_of_which_a_key_is_missing(kernels: Kernels):
    requests = (((0,), 255, 1),) * 3 + (((0,), 300, 1),) * 2
    assert_same_bits(Step(Shape(requests, branch_pages=300, page_size=1)))


def test_branches_within_branches(kernels: Kernels):
    branches = ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
    requests = tuple((each, 830, 1) for each in branches * 3)
    assert_same_bits(Step(Shape(requests, branch_pages=4)))


@pytest.mark.parametrize("num_keys", [699, 700, 1000])
@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_spans_about_as_long_as_the_keys(kernels: Kernels, kind, num_keys):
    assert_same_bits(Step(replace(ONE_PROMPT, span=AttentionSpan(**{kind: num_keys}))))


def test_what_is_not_a_number_stays_in_its_own_request(kernels: Kernels):
    step = Step(ONE_PROMPT)
    wanted = step.run(step.cache)
    step.query[0] = float("nan")
    output = step.run(step.cache)
    assert bool(output[0].isnan().all())
    assert torch.equal(output[1:], wanted[1:])


def test_one_of_many_requests_is_the_same_bits_alone(kernels: Kernels):
    many, alone = Step(ONE_PROMPT), Step(ONE_PROMPT)
    wanted = many.run(many.cache)[:1]
    alone.shape = replace(ONE_PROMPT, requests=ONE_PROMPT.requests[:1])
    alone.num_queries, alone.tables, alone.query = [1], alone.tables[:1], alone.query[:1]
    assert torch.equal(alone.run(alone.cache), wanted)
