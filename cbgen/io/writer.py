"""Output rows to OUT in the order asked for, each with the system before `write` returns.

In order `input` the rows that finish ahead wait in OUT.journal, or for stdout and other streams in
memory and a temporary file. After a crash OUT and the journal together hold every row that was
written; a row may stand in both. Knows nothing of what a row says.
"""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import Literal, Self

from cbgen.errors import OutputError
from cbgen.io.output_file import ClosedOutput, OutputFile, journal_path, refuse_same_file
from cbgen.io.waiting import Journal, Spool, WaitingRows

__all__ = ["ClosedOutput", "RowWriter", "refuse_same_file"]

SYNC_SECONDS = 1.0
"""How often files are synced at most."""
COMPACT_BYTES = 4 * 2**20
"""The journal is shrunk when it holds more than this, and than waits, of rows already in OUT."""
DRAIN_BYTES = 8 * 2**20
"""Waiting rows that one `write` moves to OUT at most, so that no call takes long."""
_CHUNK_BYTES = 2**20


class RowWriter:
    """Writer of one output; one thread at a time may call it.

    Until the first row is written an earlier output that is to be overwritten stays as it was.

    Args:
        path: the file, or `-` for stdout.
        order: `input`: by index, which counts from 0 without gaps; `completion`: as the rows come.
        overwrite: replace what exists instead of refusing it.

    Raises:
        UsageError: the output or its journal exists, or cannot be written.
    """

    def __init__(
        self,
        path: str,
        *,
        order: Literal["input", "completion"] = "input",
        overwrite: bool = False,
    ) -> None:
        path = "-" if path == "/dev/stdout" else path
        self._journal: Journal | None = None
        self._waiting: WaitingRows | None = None
        self._begun = False
        self._closed = False
        self._synced_at = time.monotonic()
        self._output = OutputFile.open(path, overwrite=overwrite)
        if order == "completion":
            return
        if not self._output.is_regular:
            self._waiting = WaitingRows(Spool())
            return
        opened = False
        try:
            self._journal = Journal(journal_path(path), overwrite=overwrite)
            opened = True
        finally:
            if not opened:
                self._output.remove_if_created()
        self._waiting = WaitingRows(self._journal)

    def write(self, index: int, line: bytes) -> None:
        r"""Write the row of an index: one line with its `\n`.

        Raises:
            OutputError: it cannot be written; call `abort`.
            ClosedOutput: the reader of the pipe has gone.
        """
        assert line.endswith(b"\n"), "a row ends its line"
        if not self._begun:
            self._begin()
        if self._waiting is None:
            self._output.append(line)
        elif index == self._waiting.next_index:
            self._output.append(line)
            self._waiting.pass_one()
        else:
            self._waiting.put(index, line)
        if self._waiting:
            self._drain(self._waiting, DRAIN_BYTES)
        self.sync_if_due()

    def sync_if_due(self) -> None:
        """Sync the files if the last time is a second ago; for a loop to call when no rows come.

        Raises:
            OutputError: the disk fails.
        """
        now = time.monotonic()
        if now - self._synced_at >= SYNC_SECONDS:
            self._synced_at = now
            self._sync()

    def close(self) -> None:
        """Write all rows that wait, sync, and remove the journal.

        Raises:
            OutputError: a row is missing in between, or the output cannot be written; what was
                written stays in OUT and its journal.
            ClosedOutput: the reader of the pipe has gone.
        """
        if self._closed:
            return
        if not self._begun:
            self._begin()
        if self._waiting is not None:
            while self._drain(self._waiting, DRAIN_BYTES):
                pass
            if self._waiting:
                raise OutputError(
                    f"{self._output.path}: row {self._waiting.next_index} never came; "
                    "the rows after it are kept in the journal"
                )
        self._output.sync()
        self._closed = True
        self._output.close()
        if self._waiting is not None:
            self._waiting.store.discard()

    def abort(self) -> None:
        """End before all rows are there, losing none: OUT and the journal stay, to be resumed.

        A stream gets the rows that wait, in order. Files that this run made are removed if it wrote
        nothing into them. Raises nothing of its own.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OutputError, ClosedOutput):
            if self._waiting is not None and self._journal is None:
                for line in self._waiting.remaining():
                    self._output.append(line)
        with contextlib.suppress(OutputError):
            self._sync()
        for file in (self._output, self._journal):
            if file is not None:
                with contextlib.suppress(OutputError):
                    file.close() if self._begun else file.remove_if_created()
        if self._journal is None and self._waiting is not None:
            self._waiting.store.discard()

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close after success, abort after an exception."""
        if kind is not None:
            self.abort()
            return
        closed = False
        try:
            self.close()
            closed = True
        finally:
            if not closed:
                self.abort()

    def _begin(self) -> None:
        self._output.clear()
        if self._journal is not None:
            self._journal.clear()
        self._begun = True

    def _drain(self, waiting: WaitingRows, most_bytes: int) -> bool:
        """Move rows whose turn it is to OUT; return whether any was moved."""
        moved = 0
        while moved < most_bytes and (lines := waiting.ready(_CHUNK_BYTES)):
            chunk = b"".join(lines)
            self._output.append(chunk)
            waiting.drop(lines)
            moved += len(chunk)
        if moved and waiting.is_wasteful(COMPACT_BYTES):
            self._output.sync()  # before the journal's copies go
            waiting.compact()
        return moved > 0

    def _sync(self) -> None:
        self._output.sync()
        if self._waiting is not None:
            self._waiting.store.sync()
