"""A parquet output: it is written as a whole when all its rows are there, beside its name first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from cbgen.errors import OutputError, UsageError
from cbgen.io.output_file import OutputFile, file_error, refuse_path, replace_file, sync_folder
from cbgen.io.parquet import load_arrow
from cbgen.io.parquet_output import write_parquet


class TableFile:
    """The output; until `write` it does not exist, or is an earlier run's.

    Raises:
        UsageError: it exists and `overwrite` is false, is no regular file, or pyarrow is missing.
    """

    is_regular = True

    def __init__(self, path: str, *, overwrite: bool) -> None:
        load_arrow()
        refuse_path(path, overwrite=overwrite)
        if Path(path).exists() and not Path(path).is_file():
            raise UsageError(f"{path}: parquet needs a file; use another suffix for a pipe")
        self.path = path

    def cut(self, size: int = 0) -> None:
        """Delete the file, unless it stays as it is.

        Raises:
            OutputError: it cannot be deleted.
        """
        if size:
            return
        try:
            Path(self.path).unlink(missing_ok=True)
        except OSError as error:
            raise file_error(self.path, "replaced", error) from error
        sync_folder(self.path)

    def append(self, lines: bytes) -> None:
        """Take no rows one by one; they wait for `write`."""
        raise AssertionError("rows of a table wait in the journal")

    def write(self, lines: Callable[[], Iterator[bytes]]) -> None:
        """Write the file; until then, nothing has its name.

        Raises:
            OutputError: it cannot be written.
        """
        file = OutputFile.open(self.path + ".new", overwrite=True)
        file.cut()
        complete = False
        try:
            write_parquet(file, lines)
            file.sync()
            file.close()
            replace_file(file.path, self.path)
            complete = True
        finally:
            if not complete:
                with contextlib.suppress(OutputError):
                    file.remove()

    def sync(self) -> None:
        """Do nothing: what `write` wrote is on disk."""

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def remove_if_created(self) -> None:
        """Do nothing: nothing was made."""
