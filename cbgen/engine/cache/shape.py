"""How many blocks a request takes. Arithmetic alone; the plan and the cache count with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cbgen.engine.cache.groups import AttentionSpan


@dataclass(frozen=True, slots=True)
class CacheShape:
    """How many blocks of the pool a request takes: one a page in each group, fewer with a window.

    A step runs at most `chunk_tokens` of one prompt, so a windowed group needs the blocks of its
    window and of that many tokens, however long the request is.
    """

    spans: tuple[AttentionSpan, ...]
    """Of each group."""
    page_size: int
    chunk_tokens: int

    @classmethod
    def make(
        cls,
        spans: Sequence[AttentionSpan],
        page_size: int,
        *,
        num_pool_blocks: int,
        max_batch_tokens: int,
    ) -> CacheShape:
        """Return the shape whose chunks are so short that all windows fit in half of the pool."""
        shape = cls(tuple(spans), page_size, max_batch_tokens)
        while shape.chunk_tokens > page_size and 2 * shape.window_blocks > num_pool_blocks:
            shape = cls(shape.spans, page_size, max(page_size, shape.chunk_tokens // 2))
        return shape

    @property
    def most_blocks(self) -> tuple[int | None, ...]:
        """Most blocks that a request needs at once, by group; None = all of its pages."""
        return tuple(span.most_blocks(self.chunk_tokens, self.page_size) for span in self.spans)

    @property
    def window_blocks(self) -> int:
        """Most blocks of a request in all groups with a window together."""
        return sum(most for most in self.most_blocks if most is not None)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that a request of `num_tokens` stored tokens takes."""
        return int(self.blocks_for_pages(-(-num_tokens // self.page_size)))

    def blocks_for_pages(self, num_pages: float) -> float:
        """Return the blocks for a request of so many pages, an average one perhaps."""
        return sum(num_pages if most is None else min(num_pages, most) for most in self.most_blocks)

    def lasting_blocks(self, num_tokens: int, num_shared_pages: int = 0) -> int:
        """Return the blocks that a request of `num_tokens` tokens has for itself once it decodes.

        Windows have moved past shared pages then, and each holds what it sees and a page that is
        being filled.
        """
        pages = -(-num_tokens // self.page_size)
        most = [span.most_blocks(self.page_size, self.page_size) for span in self.spans]
        own = max(0, pages - num_shared_pages)
        return sum(own if count is None else min(pages, count) for count in most)

    def longest_request(self, num_pool_blocks: int) -> int:
        """Return the tokens of the longest request that so many blocks can store.

        `sys.maxsize // 2` where the windows of all groups fit: there is no bound then.
        """
        unbounded = sys.maxsize // 2
        if self.blocks_for(unbounded) <= num_pool_blocks:
            return unbounded
        pages = largest(
            num_pool_blocks, lambda count: self.blocks_for_pages(count) <= num_pool_blocks
        )
        return pages * self.page_size


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
