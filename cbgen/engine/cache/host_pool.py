"""Host memory for the blocks of preempted requests: which host blocks hold whose. No tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cbgen.engine.step import BlockSwap


@dataclass(frozen=True, slots=True)
class HostCopy:
    """What a preempted request has in the host pool."""

    num_tokens: int
    """Tokens stored, from the first on; windowed groups have what their window still needs."""
    blocks: dict[tuple[int, int], int]
    """(logical block, group) -> host block."""


class HostPool:
    """Owns the host blocks, numbered from 0, and who has which."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._copies: dict[str, HostCopy] = {}

    @property
    def num_free(self) -> int:
        """Host blocks that are free."""
        return len(self._free)

    def find(self, request_id: str) -> HostCopy | None:
        """Return what a request has here."""
        return self._copies.get(request_id)

    def store(
        self, request_id: str, num_tokens: int, blocks: Iterable[tuple[tuple[int, int], int]]
    ) -> tuple[BlockSwap, ...] | None:
        """Take a copy of a request's blocks; None if there is no room for all of them.

        Args:
            request_id: has nothing here yet.
            num_tokens: tokens that are stored in the blocks.
            blocks: ((logical block, group), device block).
        """
        held = list(blocks)
        if len(held) > len(self._free):
            return None
        host = [self._free.pop() for _ in held]
        places = (place for place, _ in held)
        self._copies[request_id] = HostCopy(num_tokens, dict(zip(places, host, strict=True)))
        return tuple(
            BlockSwap(device_block, host_block)
            for (_, device_block), host_block in zip(held, host, strict=True)
        )

    def free(self, request_id: str) -> None:
        """Give up what a request has here; without effect if that is nothing."""
        copy = self._copies.pop(request_id, None)
        if copy is not None:
            self._free.extend(reversed(copy.blocks.values()))

    def clear(self) -> None:
        """Give up everything."""
        for request_id in list(self._copies):
            self.free(request_id)

    def check(self, waiting: Iterable[str]) -> None:
        """Recompute everything and compare; `waiting` are the requests that may have copies.

        Raises:
            AssertionError: a host block is lost or has two owners, or its owner is gone.
        """
        strange = self._copies.keys() - set(waiting)
        if strange:
            raise AssertionError(f"host copies of requests that do not wait: {sorted(strange)[:8]}")
        held = [block for copy in self._copies.values() for block in copy.blocks.values()]
        if sorted([*held, *self._free]) != list(range(self.num_blocks)):
            raise AssertionError("host blocks are lost or held twice")
