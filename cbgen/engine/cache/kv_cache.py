"""The cache as the scheduler sees it: who holds which blocks, and whether more can be had."""

from __future__ import annotations

from collections.abc import Iterable

from cbgen.engine.cache.block_pool import BlockPool


class KVCache:
    """Owns the block table of every admitted request.

    Invariant: a request's table has room for its stored tokens and no block beyond its known ones.
    """

    def __init__(self, num_blocks: int, page_size: int) -> None:
        self.page_size = page_size
        self._pool = BlockPool(num_blocks)
        self._tables: dict[str, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        """All blocks of the cache."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return self._pool.num_free

    @property
    def max_tokens(self) -> int:
        """Tokens that one request alone can store."""
        return self.num_blocks * self.page_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def can_allocate(self, request_id: str, num_tokens: int) -> bool:
        """Whether `allocate` would succeed."""
        held = len(self._tables.get(request_id, ()))
        return self.num_blocks_for(num_tokens) - held <= self._pool.num_free

    def allocate(self, request_id: str, num_tokens: int) -> tuple[int, tuple[int, ...]]:
        """Give a request room for `num_tokens` tokens in all.

        Returns:
            The logical index of the first new block, and the new blocks (none if there was room).

        Raises:
            ValueError: not enough blocks are free; ask `can_allocate` first.
        """
        table = self._tables.setdefault(request_id, [])
        first = len(table)
        missing = self.num_blocks_for(num_tokens) - first
        if missing <= 0:
            return first, ()
        new_blocks = self._pool.allocate(missing)
        table.extend(new_blocks)
        return first, tuple(new_blocks)

    def free(self, request_id: str) -> None:
        """Take all blocks of a request back; without effect if it holds none."""
        self._pool.release(reversed(self._tables.pop(request_id, [])))

    def block_table(self, request_id: str) -> tuple[int, ...]:
        """Return the blocks of a request in logical order."""
        return tuple(self._tables.get(request_id, ()))

    def check(self, requests: Iterable[tuple[str, int, int]]) -> None:
        """Recompute everything from scratch and compare.

        Args:
            requests: each admitted request with the tokens it has stored and the tokens it knows.

        Raises:
            AssertionError: a count, a table or the free list is wrong.
        """
        self._pool.check(self._tables.values())
        admitted = {request_id: (stored, known) for request_id, stored, known in requests}
        if admitted.keys() != self._tables.keys():
            strange = sorted(admitted.keys() ^ self._tables.keys())
            raise AssertionError(f"block tables and admitted requests differ: {strange[:8]}")
        for request_id, (stored, known) in admitted.items():
            held = len(self._tables[request_id])
            if not self.num_blocks_for(stored) <= held <= self.num_blocks_for(known):
                raise AssertionError(
                    f"{request_id} holds {held} blocks with {stored} tokens stored, {known} known"
                )
