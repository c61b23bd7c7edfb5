"""Which blocks are free, which are in use, and which hold something worth keeping. No tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """Owns the state of every block, numbered from 0: in use, cached or empty.

    A block in use has references. One without is empty, or cached: what it holds may be wanted
    again. Cached blocks count as free. They are evicted one at a time and only when there are no
    empty ones, the one that was released longest ago first.

    Args:
        num_blocks: all blocks.
        on_evict: is told of each cached block whose contents are given up to make room.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] = lambda _: None) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._on_evict = on_evict
        self._empty = list(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that somebody refers to."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks without references whose contents are kept."""
        return len(self._cached)

    def is_free(self, block_id: int) -> bool:
        """Whether nobody refers to a block."""
        return self._references[block_id] == 0

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference; evict cached ones if need be.

        Raises:
            ValueError: fewer than `count` blocks are free; ask `num_free` first.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} free")
        while len(self._empty) < count:
            block_id, _ = self._cached.popitem(last=False)
            self._empty.append(block_id)
            self.num_evictions += 1
            self._on_evict(block_id)  # may empty further blocks
        block_ids = [self._empty.pop() for _ in range(count)]
        for block_id in block_ids:
            self._references[block_id] = 1
        return block_ids

    def acquire(self, *block_ids: int) -> None:
        """Add a reference to each of some blocks in use or cached.

        Raises:
            ValueError: a block is empty.
        """
        references = self._references
        for block_id in block_ids:
            if references[block_id] == 0:
                if block_id not in self._cached:
                    raise ValueError(f"block {block_id} is acquired but holds nothing")
                del self._cached[block_id]
            references[block_id] += 1

    def release(self, block_id: int, *, keep: bool = False) -> None:
        """Drop one reference; without any, the block becomes cached (`keep`) or empty.

        Raises:
            ValueError: the block is free already.
        """
        if self._references[block_id] <= 0:
            raise ValueError(f"block {block_id} is released but nobody holds it")
        self._references[block_id] -= 1
        if self._references[block_id] == 0:
            if keep:
                self._cached[block_id] = None
            else:
                self._empty.append(block_id)

    def touch(self, block_id: int) -> None:
        """Count a cached block as just used; blocks in use need not be told."""
        if block_id in self._cached:
            self._cached.move_to_end(block_id)

    def discard(self, block_id: int) -> None:
        """Make a cached block empty: what it holds is of no use any more."""
        if block_id in self._cached:
            del self._cached[block_id]
            self._empty.append(block_id)

    def check(self, holders: Iterable[Iterable[int]], cached: Iterable[int]) -> None:
        """Recompute all states and compare.

        Args:
            holders: the blocks of each holder.
            cached: blocks that somebody can find again, in use or not.

        Raises:
            AssertionError: reference counts, cached blocks or empty blocks disagree.
        """
        expected = [0] * self.num_blocks
        for block_ids in holders:
            for block_id in block_ids:
                expected[block_id] += 1
        if expected != self._references:
            wrong = [i for i in range(self.num_blocks) if expected[i] != self._references[i]]
            raise AssertionError(
                f"reference counts of blocks {wrong[:8]} disagree with their holders"
            )
        unreferenced = {block_id for block_id in cached if expected[block_id] == 0}
        if unreferenced != self._cached.keys():
            strange = sorted(unreferenced ^ self._cached.keys())
            raise AssertionError(f"blocks {strange[:8]} are cached for nobody, or lost")
        free = [block_id for block_id in range(self.num_blocks) if expected[block_id] == 0]
        if sorted([*self._empty, *self._cached]) != free:
            raise AssertionError("the free blocks disagree with the reference counts")
