"""Packed output: gzip members and zstd frames that end where rows end.

Owns packing, the file that frames are appended to, and reading whole frames back. Where a file is
torn, everything before the torn frame is intact.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from cbgen.io.output_file import OutputFile
from cbgen.io.packed import load_zstd

FRAME_BYTES = 2**20
"""Rows that are packed together: about as many bytes; less where a second has passed."""

_GZIP_LEVEL = 6
_ZSTD_LEVEL = 3
_PIECE_BYTES = 4096  # more than 100 MiB can come out of them, and nearly never do


class FrameFile:
    """An output whose rows are packed: they are in the file after `sync`, if not before.

    Args:
        file: takes the frames.
        kind: gzip or zstd.

    Raises:
        UsageError: the package that packs them is not installed.
    """

    def __init__(self, file: OutputFile, kind: str) -> None:
        self._file = file
        self._pack = _packer(kind)
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    @property
    def is_regular(self) -> bool:
        """Whether it is a file and no pipe."""
        return self._file.is_regular

    def cut(self, size: int = 0) -> None:
        """Drop what a regular file holds beyond its first `size` bytes, which end a frame."""
        self._pending.clear()
        self._pending_bytes = 0
        self._file.cut(size)

    def append(self, lines: bytes) -> None:
        """Take whole lines.

        Raises:
            OutputError: a frame could not be written; the file ends with its last whole one.
            ClosedOutput: the pipe has no reader any more.
        """
        self._pending.append(lines)
        self._pending_bytes += len(lines)
        if self._pending_bytes >= FRAME_BYTES:
            self._end_frame()

    def sync(self) -> None:
        """Put on disk what was taken.

        Raises:
            OutputError: the disk fails.
            ClosedOutput: the pipe has no reader any more.
        """
        self._end_frame()
        self._file.sync()

    def close(self) -> None:
        """Close the file; what was not synced is not in it."""
        self._file.close()

    def remove_if_created(self) -> None:
        """Close the file and delete it, unless it was there before this run."""
        self._file.remove_if_created()

    def _end_frame(self) -> None:
        if self._pending:
            self._file.append(self._pack(b"".join(self._pending)))
            self._pending.clear()
            self._pending_bytes = 0


def read_frames(stream: BinaryIO, kind: str, start: int = 0) -> Iterator[bytes | int]:
    """Yield the lines of all whole frames, and after each frame that ends a line its end.

    The end is a byte offset: cut there, the file holds the lines before it and no others.

    Args:
        stream: the file.
        kind: gzip or zstd.
        start: offset of the first frame to read.

    Raises:
        UsageError: the package that unpacks them is not installed.
    """
    ends = (end for _, end in _pieces(stream, kind, start) if end is not None)
    whole_end = max(ends, default=start)
    reached, rest = start, b""
    pieces = _pieces(stream, kind, start)
    while reached < whole_end:
        data, end = next(pieces)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line + b"\n"
        if end is not None:
            reached = end
            if not rest:
                yield end


def _pieces(stream: BinaryIO, kind: str, offset: int) -> Iterator[tuple[bytes, int | None]]:
    """Yield what is unpacked, bit by bit, with the offset where a frame ends; up to the damage."""
    make, failure = (_gzip_member, zlib.error) if kind == "gzip" else load_zstd()
    stream.seek(offset)
    member, packed = None, b""
    while packed or (packed := stream.read(_PIECE_BYTES)):
        member = member or make()
        try:
            data = member.decompress(packed)
        except failure:
            return
        offset += len(packed)
        packed = b""
        if member.eof:
            packed = member.unused_data
            offset -= len(packed)
            member = None
            yield data, offset
        else:
            yield data, None


def _gzip_member() -> Any:  # noqa: ANN401  its class has no name
    return zlib.decompressobj(wbits=31)


def _packer(kind: str) -> Callable[[bytes], bytes]:
    if kind == "gzip":
        return lambda data: gzip.compress(data, _GZIP_LEVEL, mtime=0)
    load_zstd()
    import zstandard

    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True).compress
