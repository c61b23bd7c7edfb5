"""Which blocks are free and how many users each other block has. Pure bookkeeping, no tensors."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Owns the free list and the reference count of every block, numbered from 0.

    Invariant: a block is in the free list exactly when its reference count is 0.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference.

        Raises:
            ValueError: fewer than `count` blocks are free; ask `num_free` first.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        block_ids = [self._free.pop() for _ in range(count)]
        for block_id in block_ids:
            self._references[block_id] = 1
        return block_ids

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each block; blocks without any become free, in the given order.

        Raises:
            ValueError: a block is free already.
        """
        for block_id in block_ids:
            if self._references[block_id] <= 0:
                raise ValueError(f"block {block_id} is released but nobody holds it")
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free.append(block_id)

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Recompute all counts from the block lists of the holders and compare.

        Raises:
            AssertionError: counts or free list disagree with the holders.
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
        free = [block_id for block_id in range(self.num_blocks) if expected[block_id] == 0]
        if sorted(self._free) != free:
            raise AssertionError("the free list disagrees with the reference counts")
