"""Rows that finished before their turn, kept on disk; memory holds only the offset of each.

A store keeps the lines (the journal file beside the output, or a temporary file for stdout);
WaitingRows knows whose turn it is. Neither knows what a line says.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

from cbgen.errors import OutputError
from cbgen.io.output.output_file import NEW, OutputFile, replacement_of

SPOOL_BYTES = 64 * 2**20
"""Memory for waiting rows of stdout; beyond that they go to a temporary file."""


class Journal(OutputFile):
    """A line store in a named file, which a crash leaves readable."""

    def rewrite(self, lines: Iterable[bytes]) -> None:
        """Keep these lines, read from this store, from offset 0 on, and nothing else.

        At every moment one complete file has the journal's name.
        """
        with replacement_of(self.path) as replacement:
            for line in lines:
                replacement.append(line)
        self.take_over(replacement)

    def discard(self) -> None:
        """Delete the file, and what a crash during a rewrite may have left."""
        Path(self.path + NEW).unlink(missing_ok=True)
        self.remove()


class Spool:
    """A line store in memory, from SPOOL_BYTES on in a temporary file without a name."""

    def __init__(self, memory_bytes: int = SPOOL_BYTES) -> None:
        self._memory_bytes = memory_bytes
        self.size = 0  # bytes kept, dropped lines included until `rewrite`
        self._file = tempfile.SpooledTemporaryFile(max_size=memory_bytes)  # noqa: SIM115

    def append(self, line: bytes) -> None:
        """Keep a line at the offset `size`."""
        try:
            self._file.seek(self.size)
            self._file.write(line)
        except OSError as error:
            folder = tempfile.gettempdir()
            raise OutputError(
                f"{folder}: the rows that wait for their turn cannot be kept: {error.strerror}; "
                "make room, set TMPDIR, or use output.order: completion"
            ) from error
        self.size += len(line)

    def line_at(self, offset: int) -> bytes:
        """Return the line at an offset."""
        self._file.seek(offset)
        return self._file.readline()

    def rewrite(self, lines: Iterable[bytes]) -> None:
        """Keep these lines, read from this store, from offset 0 on, and nothing else."""
        replacement = Spool(self._memory_bytes)
        for line in lines:
            replacement.append(line)
        self._file.close()
        self._file, self.size = replacement._file, replacement.size

    def discard(self) -> None:
        """Drop everything."""
        self._file.close()


LineStore = Journal | Spool
"""Lines kept at byte offsets."""


class WaitingRows:
    """Rows by index, of which the next in order may be taken.

    `offsets[head + i]` is 1 + the offset of row `next_index + i` in the store, 0 where it has not
    come.
    """

    def __init__(self, store: LineStore, next_index: int = 0) -> None:
        self.store = store
        self.next_index = next_index
        self._offsets = array("Q")
        self._head = 0
        self._waiting_bytes = 0

    def __bool__(self) -> bool:
        """Whether a row waits."""
        return self._waiting_bytes > 0

    @property
    def end(self) -> int:
        """The index behind the last row that is known."""
        return self.next_index + len(self._offsets) - self._head

    def put(self, index: int, line: bytes) -> None:
        """Keep a row until its turn."""
        position = self._head + index - self.next_index
        is_known = position < self._head or any(self._offsets[position : position + 1])
        assert not is_known, f"row {index} came twice"
        self._note(index, self.store.size, line)
        self.store.append(line)

    def keep(self, rows: Iterable[tuple[int, bytes]]) -> None:
        """Let the store hold these rows and no others; they may be read from it meanwhile.

        What the store held besides must be safe elsewhere by then.
        """
        kept = WaitingRows(self.store, self.next_index)

        def lines() -> Iterator[bytes]:
            offset = 0
            for index, line in rows:
                kept._note(index, offset, line)
                offset += len(line)
                yield line

        self.store.rewrite(lines())
        self._offsets, self._head, self._waiting_bytes = kept._offsets, 0, kept._waiting_bytes

    def first_missing(self) -> int:
        """Return the first index that has not come; `end` where there is no gap."""
        for index in range(self.next_index, self.end):
            if not self._offsets[self._head + index - self.next_index]:
                return index
        return self.end

    def take(self, most_bytes: int) -> list[bytes]:
        """Take rows whose turn it is, in order: one at least, of about `most_bytes` in all."""
        lines: list[bytes] = []
        for position in range(self._head, len(self._offsets)):
            if most_bytes <= 0 or not self._offsets[position]:
                break
            line = self.store.line_at(self._offsets[position] - 1)
            lines.append(line)
            most_bytes -= len(line)
        self._waiting_bytes -= sum(map(len, lines))
        self._advance(len(lines))
        return lines

    def skip_one(self) -> None:
        """Note that the next row was written without waiting."""
        waits = self._head < len(self._offsets) and self._offsets[self._head] != 0
        assert not waits, f"row {self.next_index} came twice"
        self._advance(1)

    def rows(self) -> Iterator[tuple[int, bytes]]:
        """Yield index and line of all rows that wait, in order, whatever is missing in between."""
        for place in range(len(self._offsets) - self._head):
            if offset := self._offsets[self._head + place]:
                yield self.next_index + place, self.store.line_at(offset - 1)

    def is_wasteful(self, allowed_bytes: int) -> bool:
        """Whether the store holds more dropped bytes than are allowed and than wait."""
        dropped_bytes = self.store.size - self._waiting_bytes
        return dropped_bytes > max(allowed_bytes, self._waiting_bytes)

    def _note(self, index: int, offset: int, line: bytes) -> None:
        """Note a row that the store holds, or is about to."""
        position = self._head + index - self.next_index
        missing = position + 1 - len(self._offsets)
        if missing > 0:
            self._offsets.extend(array("Q", [0]) * missing)
        self._offsets[position] = offset + 1
        self._waiting_bytes += len(line)

    def _advance(self, count: int) -> None:
        self.next_index += count
        self._head = min(self._head + count, len(self._offsets))
        if self._head > 1024 and 2 * self._head > len(self._offsets):
            del self._offsets[: self._head]
            self._head = 0
