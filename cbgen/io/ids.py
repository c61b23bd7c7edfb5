"""Which ids were used already, in 16 bytes a row.

Ids are equal when their text is: the engine knows a request by text, so `1` and `"1"` are one id,
and so are an explicit id and another row's index that stands in for a missing one. Two different
ids are taken for equal when their 64-bit hashes are: among ten million rows that happens once in
400,000 runs.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import replace
from typing import Literal

from cbgen.errors import RowError
from cbgen.io.records import Record

_MAX_LOAD = 0.8
_GROWTH = 1.4
_FIRST_SLOTS = 1021
_MASK = 2**64 - 1


class IdIndex:
    """The ids of the records seen so far.

    `hashes[p]` is the hash of the id first used on line p, counted over all sources, or 0 where no
    id was. An open-addressed table of these positions finds a hash; both together are the index's
    memory.
    """

    def __init__(self, on_duplicate: Literal["error", "suffix"] = "error") -> None:
        self._on_duplicate = on_duplicate
        self._hashes = array("Q", [0])
        self._slots = array("I", [0]) * _FIRST_SLOTS
        self._used = 0
        self._source_starts = [0]
        self._sources: list[str] = [""]
        self._last_line = 0

    def admit(self, record: Record) -> Record:
        """Note the record's id and return the record, changed if the id was used before.

        Records must come in reading order. A repeated id gives a record with the error
        `duplicate_id` that names both lines, or, with `on_duplicate="suffix"`, one with an unused
        id: `a-2`, `a-3`, ...
        """
        position = self._position(record)
        if record.id is None:
            return record
        key = _hash(str(record.id))
        slot = self._slot(key)
        if not self._slots[slot]:
            self._add(key, slot, position)
            return record
        if self._on_duplicate == "suffix":
            new_id = self._unused_id(str(record.id))
            key = _hash(new_id)
            self._add(key, self._slot(key), position)
            return replace(record, id=new_id)
        first = self._place(self._slots[slot])
        name = "id" if record.dialect is None else "custom_id"
        message = (
            f"{record.place}: {name} {record.id!r} was used already at {first}; "
            "give each row its own id, or set output.on_duplicate_id: suffix"
        )
        return replace(record, error=RowError("duplicate_id", message))

    def _position(self, record: Record) -> int:
        """Return the record's line counted over all sources, with a hash of 0 kept for it."""
        if record.source != self._sources[-1] or record.line <= self._last_line:
            self._source_starts.append(len(self._hashes) - 1)
            self._sources.append(record.source)
        self._last_line = record.line
        position = self._source_starts[-1] + record.line
        while len(self._hashes) <= position:
            self._hashes.append(0)
        return position

    def _place(self, position: int) -> str:
        section = bisect_right(self._source_starts, position - 1) - 1
        return f"{self._sources[section]}:{position - self._source_starts[section]}"

    def _unused_id(self, text: str) -> str:
        """Find a free suffix in a logarithm of the steps that counting up would need."""
        taken, free = 1, 2
        while self._is_used(f"{text}-{free}"):
            taken, free = free, 2 * free
        while free - taken > 1:
            middle = (taken + free) // 2
            if self._is_used(f"{text}-{middle}"):
                taken = middle
            else:
                free = middle
        return f"{text}-{free}"

    def _is_used(self, text: str) -> bool:
        return self._slots[self._slot(_hash(text))] != 0

    def _slot(self, key: int) -> int:
        """Return the slot that holds a hash, or the empty one where it belongs."""
        slots, hashes = self._slots, self._hashes
        size = len(slots)
        slot = key % size
        step = 1 << (key >> 60)  # sizes are odd, so steps of a power of two visit every slot
        while (position := slots[slot]) and hashes[position] != key:
            slot = (slot + step) % size
        return slot

    def _add(self, key: int, slot: int, position: int) -> None:
        self._hashes[position] = key
        self._slots[slot] = position
        self._used += 1
        if self._used > _MAX_LOAD * len(self._slots):
            self._grow()

    def _grow(self) -> None:
        size = int(len(self._slots) * _GROWTH) | 1
        del self._slots  # before the new one is made: the hashes are enough to fill it
        self._slots = slots = array("I", [0]) * size
        for position, key in enumerate(self._hashes):
            if key:
                slot = key % size
                step = 1 << (key >> 60)
                while slots[slot]:
                    slot = (slot + step) % size
                slots[slot] = position


def _hash(text: str) -> int:
    return hash(text) & _MASK or 1
