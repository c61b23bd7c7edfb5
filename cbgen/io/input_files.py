"""Input files as rows: local ones, stdin and pipes, object stores by fsspec.

Files are read by their suffix, stdin and pipes by their content. Knows no record. Output is not
written to object stores: a row is safe once the file system has it, and a store takes whole files
alone.
"""

from __future__ import annotations

import io
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, BinaryIO, cast

from cbgen.errors import RowError, UsageError
from cbgen.io.formats.compressed import PieceStream, unpacked_stream
from cbgen.io.formats.registry import (
    HEAD_BYTES,
    choose_format,
    format_of_name,
    is_undecided,
    refuse_packed_twice,
)
from cbgen.io.records import read_lines

_BUFFER_BYTES = 2**20
_PACKED_BUFFER_BYTES = 2**17
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def read_rows(path: str) -> Iterator[bytes | RowError]:
    """Yield each row of an input as a line of JSON, or what is wrong with it; `-` is stdin.

    Raises:
        UsageError: it cannot be opened, holds something else than its name says, or is damaged;
            every row before that was given.
    """
    if (table := format_of_name(path).table) is not None:
        with open_raw(path) as raw:
            yield from table(raw, path).lines()
    else:
        with open_input(path) as stream:
            yield from read_lines(stream, path)


def count_rows(path: str) -> int:
    """Return how many rows an input has, blank lines included; errors are those of `read_rows`."""
    if (table := format_of_name(path).table) is not None:
        with open_raw(path) as raw:
            return table(raw, path).num_rows
    with open_input(path) as stream:
        num_lines, last = 0, b"\n"
        while chunk := stream.read(_BUFFER_BYTES):
            num_lines += chunk.count(b"\n")
            last = chunk[-1:]
        return num_lines + (last != b"\n")


def open_input(path: str) -> BinaryIO:
    """Open an input of lines as the JSONL bytes that it holds; `-` is stdin.

    Raises:
        UsageError: it cannot be opened, or holds something else than its name says.
    """
    raw = open_raw(path)
    try:
        return unpack(raw, path, is_stream=is_stream(path))
    except BaseException:
        raw.close()
        raise


def unpack(
    raw: BinaryIO, path: str, *, is_stream: bool = False, buffer_bytes: int = _BUFFER_BYTES
) -> BinaryIO:
    """Return the unpacked bytes of an open file; closing them closes it.

    Raises:
        UsageError: it cannot be read, or holds something else than its name says.
    """
    try:
        head = _read_head(raw)
        codec = choose_format(head, path, is_stream=is_stream).codec
        piece_bytes = buffer_bytes if codec is None else min(_PACKED_BUFFER_BYTES, buffer_bytes)
        rest = iter(lambda: raw.read(piece_bytes), b"")
        stream = io.BufferedReader(PieceStream(chain((head,), rest), raw), piece_bytes)
        if codec is not None:
            stream = io.BufferedReader(unpacked_stream(stream, codec()), buffer_bytes)
            if not is_stream:
                with suppress(OSError):  # torn at its start; its reader learns that with its place
                    refuse_packed_twice(stream.peek(HEAD_BYTES), path)
    except OSError as error:
        raise UsageError(f"{path}: the input cannot be read: {error.strerror or error}") from error
    return cast(BinaryIO, stream)


def open_raw(path: str) -> BinaryIO:
    """Open an input as it is.

    Raises:
        UsageError: it cannot be opened.
    """
    if path == "-":
        return _open_stdin()
    if is_remote(path):
        return open_remote(path)
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise UsageError(f"{path}: the input cannot be opened: {error.strerror}") from error


def check_input(path: str) -> None:
    """Refuse a local file that cannot be read or holds something else than its name says.

    Leaves streams and remote files alone: they are read once, or slow to reach.

    Raises:
        UsageError: it is refused.
    """
    if path == "-":
        _open_stdin()
        return
    kind = format_of_name(path)
    kind.check_package()
    if is_remote(path):
        return
    if is_stream(path):
        if kind.table is not None:
            raise UsageError(f"{path}: {kind.name} cannot be read from a pipe; give a file")
        return
    with open_raw(path) as raw, unpack(raw, path):
        if kind.table is not None:
            raw.seek(0)
            kind.table(raw, path)  # refuses what is no whole file


def is_stream(path: str) -> bool:
    """Whether an input can be read but once: stdin, a pipe, a device."""
    if is_remote(path):
        return False
    try:
        return path == "-" or not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def _open_stdin() -> BinaryIO:
    if sys.stdin is None:
        raise UsageError("-i -: stdin is closed; give a file or pipe rows in")
    try:
        # A stream of its own: at exit the interpreter waits for the lock of sys.stdin, and a
        # thread that waits for a pipe would hold it.
        return open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)
    except OSError:  # a stand-in for stdin, as test runners have
        return sys.stdin.buffer


def _read_head(raw: BinaryIO) -> bytes:
    """Read what tells the kind of content, and from a slow pipe no more than that."""
    head = raw.read(HEAD_BYTES)
    while is_undecided(head) and (more := raw.read(HEAD_BYTES)):
        head += more
    return head


class ReopenedFile(io.RawIOBase):
    """The bytes of a regular file that is open only while it is read from.

    So thousands can be read side by side. The file must not change meanwhile.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset = 0

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def seekable(self) -> bool:
        """Say that it can be sought in."""
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401  any writable buffer
        """Fill the buffer as far as the file goes; 0 at its end."""
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            size = os.preadv(descriptor, [buffer], self._offset)
        finally:
            os.close(descriptor)
        self._offset += size
        return size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset."""
        if whence == os.SEEK_CUR:
            offset += self._offset
        elif whence == os.SEEK_END:
            offset += os.path.getsize(self._path)
        self._offset = offset
        return offset


def is_remote(path: str) -> bool:
    """Whether a path has a scheme, such as s3://, gs:// or memory://."""
    return _SCHEME.match(path) is not None


def find_remote(pattern: str) -> list[str]:
    """Return the files that a path with or without wildcards names, in no order.

    Raises:
        UsageError: it is a folder, does not exist, or cannot be reached.
    """
    files, path = _file_system(pattern)
    with _failures_of(pattern):
        if any(mark in path for mark in "*?["):
            return [files.unstrip_protocol(name) for name in files.glob(path)]
        if files.isdir(path):
            raise UsageError(f"{pattern}: is a folder; name its files: '{pattern}/*.jsonl'")
        files.info(path)
    return [pattern]


def open_remote(path: str) -> BinaryIO:
    """Open a file for reading; it can be read through and sought in.

    Raises:
        UsageError: it cannot be opened.
    """
    files, inner = _file_system(path)
    with _failures_of(path):
        return cast(BinaryIO, files.open(inner, "rb"))


def refuse_remote_output(path: str) -> None:
    """Refuse an output that is not on a file system.

    Raises:
        UsageError: the path has a scheme.
    """
    if is_remote(path):
        raise UsageError(
            f"{path}: rows are written to local files alone, so that each is safe once it is "
            "finished; write one and copy it when the run has ended"
        )


def _file_system(path: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise UsageError(
            f"{path}: needs the package fsspec: pip install 'cbgen[fsspec]'"
        ) from error
    with _failures_of(path):
        files, inner = url_to_fs(path)
    return files, inner


@contextmanager
def _failures_of(path: str) -> Iterator[None]:
    """Turn what fsspec raises into UsageError."""
    try:
        yield
    except FileNotFoundError as error:
        raise UsageError(f"{path}: the input cannot be opened: it does not exist") from error
    except (OSError, ValueError, ImportError, NotImplementedError) as error:
        raise UsageError(f"{path}: the input cannot be opened: {error}") from error
