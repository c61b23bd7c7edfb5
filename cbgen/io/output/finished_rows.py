"""What an earlier run left in OUT and OUT.journal, and how a run goes on from there.

First everything is read: which rows stay, and how much of OUT can stay as it is. Nothing is changed
before the first new row is there. Then the journal is written anew, with the rows that stay but not
in their place in OUT, and only once they are safe there OUT is cut: at every moment both files
together hold every row that stays.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from itertools import chain, count
from typing import Literal

from cbgen.errors import UsageError
from cbgen.io.dialects import read_outcome
from cbgen.io.formats.registry import format_of_name
from cbgen.io.output.journal import Journal, WaitingRows
from cbgen.io.output.output_file import OutputFile, journal_path, read_lines
from cbgen.io.rows import RowOutcome


class RowSet:
    """Positions from 0, in one bit each; grows to the largest one added."""

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


class FinishedRows:
    """The rows of an earlier run.

    Args:
        path: OUT.
        order: in which the rows shall stand.
        position: returns the place of a row among all, None for one that is to be dropped.
        on_kept: told of every row that stays.

    Raises:
        UsageError: a file cannot be read.
    """

    def __init__(
        self,
        path: str,
        *,
        order: Literal["input", "completion"],
        position: Callable[[RowOutcome], int | None],
        on_kept: Callable[[RowOutcome], None],
    ) -> None:
        self._path = path
        self._order = order
        self._position = position
        self.answered = RowSet()
        """Positions of the rows that stay."""
        self._in_place = RowSet()
        self._end = 0  # bytes of OUT that can stay, all rows in their places
        try:
            self._scan_output(on_kept)
            for item in read_lines(journal_path(path)):
                if isinstance(item, bytes):
                    self._keep(item, self.answered, on_kept)
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error

    @property
    def is_complete(self) -> bool:
        """Whether OUT as it is holds all rows that stay, and no others."""
        return len(self._in_place) == len(self.answered) and self._end == _size(self._path)

    def apply(self, output: OutputFile, journal: Journal) -> WaitingRows:
        """Bring both files into the state from which the run goes on; return the rows that wait.

        Raises:
            OutputError: a file cannot be written; nothing is lost.
        """
        if output.is_table:  # it is written anew as a whole
            self._end, self._in_place = 0, RowSet()
        waiting = WaitingRows(journal, len(self._in_place))
        waiting.keep(self._moved())
        output.cut(self._end)
        output.sync()
        return waiting

    def _scan_output(self, on_kept: Callable[[RowOutcome], None]) -> None:
        is_in_place = True
        since_last_cut = array("Q")
        for item in _read_output(self._path, 0):
            if isinstance(item, int):
                if is_in_place:
                    self._end = item
                    for settled in since_last_cut:
                        self._in_place.add(settled)
                    since_last_cut = array("Q")
                continue
            position = self._keep(item, self.answered, on_kept)
            expected = len(self._in_place) + len(since_last_cut)
            if position is None or (self._order == "input" and position != expected):
                is_in_place = False
            elif is_in_place:
                since_last_cut.append(position)

    def _keep(
        self, line: bytes, seen: RowSet, on_kept: Callable[[RowOutcome], None] = lambda _: None
    ) -> int | None:
        """Return the position of a row that stays and was not seen yet, which it then is."""
        outcome = read_outcome(line)
        position = None if outcome is None else self._position(outcome)
        if outcome is None or position is None or position in seen:
            return None
        seen.add(position)
        on_kept(outcome)
        return position

    def _moved(self) -> Iterator[tuple[int, bytes]]:
        """Yield the rows that do not stay in OUT, by their places."""
        places = count(len(self._in_place))
        journal = read_lines(journal_path(self._path))
        for item in chain(_read_output(self._path, self._end), journal):
            if isinstance(item, int) or (position := self._keep(item, self._in_place)) is None:
                continue
            yield position if self._order == "input" else next(places), item


def holds_rows(path: str) -> bool:
    """Whether an earlier run left anything in OUT or its journal."""
    return _size(path) > 0 or _size(journal_path(path)) > 0


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0


def _read_output(path: str, start: int) -> Iterator[bytes | int]:
    """Yield the whole lines of OUT from an offset on, and the offsets where it may be cut."""
    return format_of_name(path).read_output(path, start) if _size(path) else iter(())
