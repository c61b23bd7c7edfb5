"""Output rows to OUT in the order asked for, each handed to the system before `write` returns.

A row goes to OUT at once where it can: as a line, when its turn has come. Otherwise it waits in
OUT.journal, or for stdout and other streams in memory and a temporary file. Rows for .gz and .zst
stay in the journal until the frame that holds them is on disk, those for .parquet until the end.
After a crash OUT and the journal together hold every row that was written; a row may stand in both.
Knows nothing of what a row says.
"""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import Literal, Self

from cbgen.errors import OutputError
from cbgen.io.formats.registry import JSON_LINES, format_of_name
from cbgen.io.output.finished_rows import FinishedRows
from cbgen.io.output.journal import Journal, Spool, WaitingRows
from cbgen.io.output.output_file import ClosedOutput, journal_path, lock_output
from cbgen.io.output.run_file import RunFile

SYNC_SECONDS = 1.0
"""How often files are synced at most."""
COMPACT_BYTES = 4 * 2**20
"""The journal is shrunk when it holds more than this, and than waits, of rows already in OUT."""
DRAIN_BYTES = 4 * 2**20
"""Waiting rows that one `write` moves to OUT at most, so that no call takes long."""


class RowWriter:
    """Writer of one output; one thread at a time may call it.

    Until the first row is written an earlier output stays as it was.

    Args:
        path: the file, or `-` for stdout; its suffix says how it is packed.
        order: `input`: by index, which counts from 0 without gaps; `completion`: as the rows come.
        overwrite: replace what exists instead of refusing it.
        finished: rows of the run before to go on from; then `write` gets the others alone.
        run: the locked OUT.run; it begins when the output does, and is closed with it.

    Raises:
        UsageError: the output or its journal exists, or cannot be written.
    """

    def __init__(
        self,
        path: str,
        *,
        order: Literal["input", "completion"] = "input",
        overwrite: bool = False,
        finished: FinishedRows | None = None,
        run: RunFile | None = None,
    ) -> None:
        self._path = path
        self._order = order
        self._finished = finished
        self._run = run
        self._begun = False  # from then on files may have changed
        self._closed = False
        self._synced_at = time.monotonic()
        self._journal: Journal | None = None
        self._open(overwrite or finished is not None)
        self._waiting = WaitingRows(self._journal or Spool())
        files = (run, self._output, self._journal)  # OUT.run is ahead of the rows
        self._files = [file for file in files if file is not None]

    def write(self, index: int, line: bytes) -> None:
        r"""Write the row of an index: one line with its `\n`.

        Raises:
            OutputError: it cannot be written; call `abort`.
            ClosedOutput: the reader of the pipe has gone.
        """
        assert line.endswith(b"\n"), "a row ends its line"
        self._begin()
        waiting = self._waiting
        place = index if self._order == "input" else waiting.end
        if place == waiting.next_index and not self._output.is_table:
            if self._output.holds_rows_back:
                waiting.store.append(line)  # until its frame is on disk
            self._output.append(line)
            waiting.skip_one()
        else:
            waiting.put(place, line)
        self._drain()
        self.sync_if_due()

    def sync_if_due(self) -> None:
        """Sync the files if the last time is a second ago; for a loop to call when no rows come.

        Raises:
            OutputError: the disk fails.
        """
        now = time.monotonic()
        if now - self._synced_at >= SYNC_SECONDS and self._begun:
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
        is_old_table = self._output.is_table and not self._begun
        if is_old_table and self._finished is not None and self._finished.is_complete:
            if self._run is not None:
                self._run.begin()
        else:
            self._begin()
            self._finish()
        if self._run is not None:
            self._run.sync()
        self._closed = True
        self._output.close()
        self._waiting.store.discard()
        if self._run is not None:
            self._run.close()

    def abort(self) -> None:
        """End before all rows are there, losing none: OUT and the journal stay, to be resumed.

        A stream gets the rows that wait, in order. Files that this run made are removed if it wrote
        nothing into them. Raises nothing of its own.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OutputError, ClosedOutput):
            if self._journal is None:
                for _, line in self._waiting.rows():
                    self._output.append(line)
            if self._begun:
                self._sync()
        for file in self._files:
            with contextlib.suppress(OutputError):
                file.close() if self._begun else file.remove_if_created()
        if self._journal is None:
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
        try:
            if kind is None:
                self.close()
        finally:
            self.abort()

    def _open(self, overwrite: bool) -> None:
        """Open output and journal, both or none."""
        kind = format_of_name(self._path)
        self._output = kind.open_output(self._path, overwrite)
        with contextlib.ExitStack() as undo:
            undo.callback(self._output.remove_if_created)
            if self._output.is_regular and not self._output.is_table:
                lock_output(self._output.descriptor, self._path)
            is_direct = self._order == "completion" and kind is JSON_LINES
            if self._output.is_regular and (not is_direct or self._finished is not None):
                self._journal = Journal.open(journal_path(self._path), overwrite=overwrite)
            undo.pop_all()

    def _begin(self) -> None:
        """Turn to writing, the first time; then see that OUT.run is ahead of the rows."""
        if not self._begun:
            self._begun = True
            if self._finished is None:
                self._output.cut()
                if self._journal is not None:
                    self._journal.cut()
            else:
                assert self._journal is not None, "who resumes has a journal"
                self._waiting = self._finished.apply(self._output, self._journal)
            if self._run is not None:
                self._sync()  # OUT.run must not speak of other rows than these files hold
                self._run.begin()
        if self._run is not None:
            self._run.flush()

    def _finish(self) -> None:
        """Write all rows that wait, and sync."""
        while self._drain():
            pass
        waiting = self._waiting
        missing = waiting.first_missing()
        if missing < waiting.end:
            raise OutputError(
                f"{self._path}: row {missing} never came; the rows after it are kept in the journal"
            )
        if self._output.is_table:
            self._output.write_all(lambda: (line for _, line in waiting.rows()))
        self._output.sync()

    def _drain(self) -> bool:
        """Move rows whose turn it is to OUT; return whether any was moved."""
        if self._output.is_table:
            return False
        waiting = self._waiting
        chunk = b"".join(waiting.take(DRAIN_BYTES))
        if chunk:
            self._output.append(chunk)
        if waiting.is_wasteful(COMPACT_BYTES):
            self._output.sync()  # before the journal's copies go
            waiting.keep(waiting.rows())
        return bool(chunk)

    def _sync(self) -> None:
        for file in self._files:
            file.sync()
