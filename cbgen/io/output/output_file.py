"""A file, pipe or terminal that lines are appended to, each whole or not at all.

Owns opening with its refusals, partial writes, cutting off a torn line, and what the errors mean.
Knows nothing of the order of rows.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import ClassVar, Self

from cbgen.errors import OutputError, UsageError
from cbgen.io.used_files import UsedFiles

NEW = ".new"
"""Ends the name of a file that is about to replace another one."""

_STDOUT = 1
_STDOUT_NAMES = ("-", "/dev/stdout")
NOT_OPEN = -1
"""The descriptor of an output that is not open, or not any more."""
_CHUNK_BYTES = 2**20
_FILE_MODE = 0o666  # less the umask, as open() does
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # file systems that know no locks
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # file systems that know no fsync


class ClosedOutput(Exception):
    """The reader of a pipe went away (`| head -1`): a quiet end, not an error."""


class OutputFile:
    """An open output of lines.

    What a file held before stays until `cut`, so that a run that fails before its first row
    destroys nothing.
    """

    is_table: ClassVar[bool] = False
    """Whether it takes no single rows: `write_all` writes it when all are there."""
    holds_rows_back: ClassVar[bool] = False
    """Whether rows may be in the file only after `sync`."""

    def __init__(self, path: str, descriptor: int, *, created: bool) -> None:
        self.path = path
        self.is_regular = not is_stream_output(path)
        self.size = 0
        """Bytes of whole lines written."""
        self.descriptor = descriptor
        self._created = created
        self._torn = False
        self._unsynced = False
        self._was_written = False

    @classmethod
    def open(cls, path: str, overwrite: bool) -> Self:
        """Open an output; `-` is stdout.

        Raises:
            UsageError: the file exists and `overwrite` is false, or it cannot be written.
        """
        if path in _STDOUT_NAMES:
            return cls("-", _STDOUT, created=False)
        refuse_path(path, overwrite=overwrite)
        created = not os.path.lexists(path)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | (os.O_EXCL if created else 0)
        if is_stream_output(path):
            flags = os.O_WRONLY
        try:
            return cls(path, os.open(path, flags, _FILE_MODE), created=created)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error.strerror}") from error

    def cut(self, size: int = 0) -> None:
        """Drop what a regular file holds beyond its first `size` bytes."""
        self.size = size
        if self.is_regular:
            self._cut_torn_line()
            self._unsynced = self._was_written = True

    def append(self, lines: bytes) -> None:
        """Hand whole lines to the operating system before returning.

        Raises:
            OutputError: they could not be written; a file ends with its last whole line.
            ClosedOutput: the pipe has no reader any more.
        """
        if self._torn:
            raise OutputError(f"{self.path}: the output ends in half a line and takes no more")
        complete = False
        try:
            _write_fully(self.descriptor, lines)
            complete = True
        except BrokenPipeError:
            raise ClosedOutput(self.path) from None
        except OSError as error:
            raise self._output_error(error) from error
        finally:
            if not complete:
                self._cut_torn_line()
        self.size += len(lines)
        self._unsynced = self._was_written = True

    def write_all(self, lines: Callable[[], Iterator[bytes]]) -> None:
        """Write all rows, and put them on disk.

        Args:
            lines: gives the rows.

        Raises:
            OutputError: they cannot be written.
            ClosedOutput: the pipe has no reader any more.
        """
        for chunk in in_chunks(lines(), _CHUNK_BYTES):
            self.append(b"".join(chunk))
        self.append(b"")  # so that a packed file without rows has a frame
        self.sync()

    def line_at(self, offset: int) -> bytes:
        """Return the line that begins at a byte offset of a regular file.

        Raises:
            OutputError: there is none: something else changed the file.
        """
        length, data = 0, b""
        while not (end := data.find(b"\n") + 1):
            if len(data) < length:
                raise OutputError(f"{self.path}: was changed by something else during the run")
            length = 8 * length or 4096
            try:
                data = os.pread(self.descriptor, length, offset)
            except OSError as error:
                raise self._output_error(error) from error
        return data[:end]

    def sync(self) -> None:
        """Put on disk what was written; without effect on pipes and terminals.

        Raises:
            OutputError: the disk fails, or something else has removed the file or cut it off.
        """
        if self.is_regular and self._unsynced:
            try:
                os.fsync(self.descriptor)
            except OSError as error:
                if error.errno not in _NO_SYNC:
                    raise self._output_error(error) from error
        self._unsynced = False
        if self.is_regular and self._was_written:
            self._refuse_foreign_change()

    def close(self) -> None:
        """Close the file; stdout stays open for the process.

        Raises:
            OutputError: the file system reports a late error.
        """
        if self.descriptor in (_STDOUT, NOT_OPEN):
            return
        descriptor, self.descriptor = self.descriptor, NOT_OPEN
        try:
            os.close(descriptor)
        except OSError as error:
            raise self._output_error(error) from error

    def take_over(self, other: OutputFile) -> None:
        """Go on in another open file, which has this one's name by now."""
        self.close()
        self.descriptor, self.size = other.descriptor, other.size
        self._torn = self._unsynced = False
        self._was_written = True

    def remove(self) -> None:
        """Close and delete the file.

        Raises:
            OutputError: it cannot be deleted.
        """
        self.close()
        try:
            Path(self.path).unlink(missing_ok=True)
        except OSError as error:
            raise self._output_error(error) from error

    def remove_if_created(self) -> None:
        """Close the file and delete it, unless it was there before this run."""
        if self._created:
            self.remove()
        else:
            self.close()

    def _refuse_foreign_change(self) -> None:
        """See that the file still has its name and its size."""
        status = os.fstat(self.descriptor)
        try:
            is_named = os.path.samestat(status, os.stat(self.path))
        except OSError:
            is_named = False
        if not is_named:
            raise OutputError(
                f"{self.path}: was removed or replaced by something else during the run; "
                "--resume goes on with the rows that are there, and answers the others again"
            )
        if status.st_size != self.size:
            raise OutputError(
                f"{self.path}: has {status.st_size} bytes, and {self.size} were written: something "
                "else changed it during the run; --resume goes on with the whole rows in it"
            )

    def _cut_torn_line(self) -> None:
        self._torn = True
        if self.is_regular:
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, self.size)
                self._torn = False

    def _output_error(self, error: OSError) -> OutputError:
        if self.is_regular:
            return file_error(self.path, "written", error)
        name = "stdout" if self.path == "-" else self.path
        return OutputError(f"{name}: cannot be written: {error.strerror or error}")


def file_error(path: str, done: str, error: OSError) -> OutputError:
    """Return the error of a file that cannot be written, replaced, ..., with its remedy."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "make room, then run again with --resume" if is_full else "--resume goes on"
    return OutputError(
        f"{path}: cannot be {done}: {error.strerror or error}; the rows before it are safe: "
        f"{remedy}"
    )


def journal_path(path: str) -> str:
    """Return where the rows that wait for their turn are kept."""
    return path + ".journal"


def run_path(path: str) -> str:
    """Return where it is noted what made an output."""
    return path + ".run"


def note_output(files: UsedFiles, path: str) -> None:
    """Note an output, and what lies beside it, among the files that a command writes.

    Raises:
        UsageError: one of them is used for something else.
    """
    files.note_written(path, "the output", given_as=path)
    if not is_stream_output(path):
        files.note_written(journal_path(path), "the output's journal", given_as=path)
        files.note_written(run_path(path), "what is noted of the run", given_as=path)


def lock_output(descriptor: int, path: str) -> None:
    """Keep other runs off an output: lock it, or the file beside it that stands for it.

    The lock is that of the open file and ends with it. A file system without locks is let pass.

    Raises:
        UsageError: another run has the lock, or the file cannot be locked.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"{path}: another run is writing it; wait for its end, or choose another output"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise UsageError(f"{path}: cannot be locked: {error.strerror}") from error


@contextlib.contextmanager
def replacement_of(path: str) -> Iterator[OutputFile]:
    """Give a new file that gets the name `path` once it is written; else it is removed.

    At every moment one complete file has the name. The new file stays open unless it was closed.

    Raises:
        OutputError: it cannot be written; the old file is still there.
    """
    file = OutputFile.open(path + NEW, overwrite=True)
    complete = False
    try:
        file.cut()
        yield file
        file.sync()
        replace_file(file.path, path)
        complete = True
    finally:
        if not complete:
            with contextlib.suppress(OutputError):
                file.remove()


def replace_file(new_path: str, path: str) -> None:
    """Give a synced file the name of another one, lasting through a power failure.

    Raises:
        OutputError: the folder cannot be changed.
    """
    try:
        os.replace(new_path, path)
    except OSError as error:
        raise file_error(path, "replaced", error) from error
    sync_folder(path)


def sync_folder(path: str) -> None:
    """Put on disk under which names the files beside `path` lie.

    Raises:
        OutputError: the disk fails.
    """
    try:
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise file_error(path, "synced", error) from error


def refuse_path(path: str, *, overwrite: bool) -> None:
    """Refuse a path where no output can be written.

    Raises:
        UsageError: it is a folder, lies in none, or exists and may not be overwritten.
    """
    if os.path.isdir(path):
        raise UsageError(f"{path}: is a folder; give the name of a file in it")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise UsageError(f"the folder {folder} does not exist; create it first")
    if os.path.lexists(path) and not overwrite and not is_stream_output(path):
        raise UsageError(
            f"{path}: already exists; use --resume to go on with it, --overwrite to replace it, or "
            "choose another output"
        )


def is_stream_output(path: str) -> bool:
    """Whether an output is stdout, a pipe or a device, which have nothing to overwrite."""
    return path in _STDOUT_NAMES or (os.path.exists(path) and not os.path.isfile(path))


def _write_fully(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # someone made the pipe non-blocking
            select.select((), (descriptor,), ())


def in_chunks(lines: Iterable[bytes], least_bytes: int) -> Iterator[list[bytes]]:
    """Yield lines together that make so many bytes, and in the end the rest."""
    chunk: list[bytes] = []
    size = 0
    for line in lines:
        chunk.append(line)
        size += len(line)
        if size >= least_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def read_lines(path: str, start: int = 0) -> Iterator[bytes | int]:
    """Yield the whole lines of a file from an offset on, and behind each where it ends.

    A torn last line is left out; a file that does not exist has no lines.
    """
    if not os.path.exists(path):
        return
    with open(path, "rb") as stream:
        stream.seek(start)
        for line in stream:
            if line.endswith(b"\n"):
                start += len(line)
                yield line
                yield start
