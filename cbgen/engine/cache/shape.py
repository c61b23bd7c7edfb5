"""The shape of the cache: pages, blocks, layer groups, dtype, and what a request takes of it.

The plan decides one CacheShape; storage, block tables, rows and memory estimates are made from it.
Arithmetic alone, no tensors.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from cbgen.engine.cache.groups import AttentionSpan, LayerFacts, LayerGroup, layers_by_place

NO_LAYERS = (LayerGroup(AttentionSpan(), ()),)
"""Groups of a model without attention layers; its requests are counted in blocks all the same."""


@dataclass(frozen=True)
class CacheShape:
    """Sizes of the cache. A request takes one block a page in each group, fewer with a window.

    A step runs at most `chunk_tokens` of one prompt, so a windowed group needs the blocks of its
    window and of that many tokens, however long the request is.
    """

    page_size: int
    groups: tuple[LayerGroup, ...] = NO_LAYERS
    """Layer groups; a block of the pool is one page in each layer of one of them."""
    num_pool_blocks: int = 0
    """Blocks of the pool that serves all groups; 0 while nothing is decided."""
    chunk_tokens: int = 1
    """Most tokens of one request that a step runs."""
    num_host_blocks: int = 0
    """Blocks of the pool that host memory has room for, for preempted requests; 0 = off."""
    dtype: str = "float32"
    """Name of the dtype of keys and values."""

    def sized(
        self, num_pool_blocks: int, max_batch_tokens: int, num_host_blocks: int = 0
    ) -> CacheShape:
        """Return the shape with so many blocks.

        Its chunks are as long as a step, or so short that all windows fit in half of the pool.
        """
        shape = replace(
            self,
            num_pool_blocks=num_pool_blocks,
            num_host_blocks=num_host_blocks,
            chunk_tokens=max_batch_tokens,
        )
        while shape.chunk_tokens > self.page_size and 2 * shape.window_blocks > num_pool_blocks:
            shape = replace(shape, chunk_tokens=max(self.page_size, shape.chunk_tokens // 2))
        return shape

    @cached_property
    def spans(self) -> tuple[AttentionSpan, ...]:
        """Which keys a query sees, for each group."""
        return tuple(group.span for group in self.groups)

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole model: a page in every layer."""
        return self.num_pool_blocks // len(self.groups)

    @property
    def itemsize(self) -> int:
        """Bytes of one element of a key or value."""
        bits = re.search(r"\d+", self.dtype)
        assert bits is not None, f"a dtype without a size: {self.dtype}"
        return int(bits[0]) // 8

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block of the pool.

        At each place that is the most that the keys of any layer take, and the most that values do.
        """
        return self.itemsize * sum(
            max(prod(self.key_page(layer)) for layer in layers)
            + max(prod(self.value_page(layer)) for layer in layers)
            for layers in layers_by_place(self.groups)
        )

    def key_page(self, layer: LayerFacts) -> tuple[int, int, int]:
        """Return the shape of a page of keys: tokens, heads, elements of a head."""
        return self.page_size, layer.num_kv_heads, layer.key_dim

    def value_page(self, layer: LayerFacts) -> tuple[int, int, int]:
        """Return the shape of a page of values: tokens, heads, elements of a head."""
        return self.page_size, layer.num_kv_heads, layer.value_dim

    def page_bytes(self, layer: LayerFacts) -> int:
        """Return the bytes of one page of a layer, keys and values together."""
        return self.page_size * layer.token_bytes(self.itemsize)

    def num_pages(self, num_tokens: int) -> int:
        """Return how many pages so many tokens take."""
        return -(-num_tokens // self.page_size)

    @cached_property
    def most_blocks(self) -> tuple[int | None, ...]:
        """Most blocks that a request needs at once, by group; None = all of its pages."""
        return self._most_pages(self.chunk_tokens)

    @property
    def window_blocks(self) -> int:
        """Most blocks of a request in all groups with a window together."""
        return sum(most for most in self.most_blocks if most is not None)

    @cached_property
    def max_tokens(self) -> int:
        """Tokens of the longest request that the pool can store.

        `sys.maxsize // 2` where the windows of all groups fit: there is no bound then.
        """
        unbounded = sys.maxsize // 2
        if self.blocks_for(unbounded) <= self.num_pool_blocks:
            return unbounded
        return self.page_size * largest(
            self.num_pool_blocks,
            lambda pages: self.blocks_for_pages(pages) <= self.num_pool_blocks,
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that a request of `num_tokens` stored tokens takes."""
        return int(self.blocks_for_pages(self.num_pages(num_tokens)))

    def blocks_for_pages(self, num_pages: float) -> float:
        """Return the blocks for a request of so many pages, an average one perhaps."""
        return sum(num_pages if most is None else min(num_pages, most) for most in self.most_blocks)

    def lasting_blocks(self, num_tokens: int, num_shared_pages: int = 0) -> int:
        """Return the blocks that a request of `num_tokens` tokens has for itself once it decodes.

        Windows have moved past shared pages then, and each holds what it sees and a page that is
        being filled.
        """
        pages = self.num_pages(num_tokens)
        own = max(0, pages - num_shared_pages)
        return sum(own if count is None else min(pages, count) for count in self._lasting_pages)

    @cached_property
    def _lasting_pages(self) -> tuple[int | None, ...]:
        return self._most_pages(self.page_size)

    def _most_pages(self, num_queries: int) -> tuple[int | None, ...]:
        """Return the most pages that so many tokens of a request see, by group; None = all.

        They are the keys of the first query, and the tokens' own, at any offset in a page.
        """
        return tuple(
            None if span.reach is None else self.num_pages(span.reach - 1 + num_queries) + 1
            for span in self.spans
        )


def largest(upper: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 0 to `upper` that fits, if what is below a fit fits too."""
    low, high = 0, upper + 1  # `low` fits, `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
