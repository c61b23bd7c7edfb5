"""A set of row positions in one bit a row."""

from __future__ import annotations


class RowSet:
    """Positions from 0; grows to the largest one added."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def add(self, position: int) -> None:
        """Add a position."""
        place, bit = position >> 3, 1 << (position & 7)
        if place >= len(self._bits):
            self._bits.extend(bytes(place + 1 - len(self._bits)))
        if not self._bits[place] & bit:
            self._bits[place] |= bit
            self._count += 1

    def __contains__(self, position: int) -> bool:
        place = position >> 3
        return place < len(self._bits) and bool(self._bits[place] & 1 << (position & 7))

    def __len__(self) -> int:
        return self._count
