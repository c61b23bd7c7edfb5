"""gzip and zstd files: members and frames one after another, read and written in little memory.

Output is packed into frames that end where rows end. Where such a file is torn, everything before
the torn frame is intact.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from cbgen.errors import UsageError
from cbgen.io.output.output_file import OutputFile

FRAME_BYTES = 2**20
"""Rows that are packed together: about as many bytes; less where a second has passed."""

_GZIP_LEVEL = 6
_ZSTD_LEVEL = 3
_INPUT_PIECE_BYTES = 1024
"""Packed bytes unpacked at a time: at most 32 MiB come out of them, nearly always far less."""
_OUTPUT_PIECE_BYTES = 4096  # rows that cbgen has packed itself


class _Decompressor(Protocol):
    """One member or frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Codec:
    """How members or frames are packed and unpacked."""

    name: str
    decompressor: Callable[[], _Decompressor]
    """Makes one for a single member or frame."""
    failure: type[Exception]
    """What a decompressor raises on damaged data."""
    compress: Callable[[bytes], bytes]
    """Packs bytes into one member or frame."""


def gzip_codec() -> Codec:
    """Return the codec of gzip."""
    return Codec(
        name="gzip",
        decompressor=lambda: zlib.decompressobj(wbits=31),
        failure=zlib.error,
        compress=lambda data: gzip.compress(data, _GZIP_LEVEL, mtime=0),
    )


def zstd_codec() -> Codec:
    """Return the codec of zstd.

    Raises:
        UsageError: zstandard is not installed.
    """
    try:
        import zstandard
    except ImportError as error:
        raise UsageError(
            ".zst files need the package zstandard: pip install 'cbgen[zstd]'"
        ) from error
    return Codec(
        name="zstd",
        decompressor=zstandard.ZstdDecompressor().decompressobj,
        failure=zstandard.ZstdError,
        compress=zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True).compress,
    )


class UnpackedStream(io.RawIOBase):
    """The content of a packed stream, which is closed with it.

    What is torn or damaged raises OSError once all bytes before it were given.
    """

    def __init__(self, source: io.BufferedIOBase, codec: Codec) -> None:
        self._source = source
        self._codec = codec
        self._member: _Decompressor | None = None
        self._packed = b""
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401  any writable buffer
        """Fill the buffer with what is there; 0 at the end.

        Raises:
            OSError: the data is damaged, or ends in the middle.
        """
        while not self._unpacked:
            self._packed = self._packed or self._source.read1(_INPUT_PIECE_BYTES)
            if not self._packed:
                if self._member is not None:
                    raise OSError(
                        f"the {self._codec.name} data ends in the middle; its rest is missing"
                    )
                return 0
            self._unpack()
        size = min(len(buffer), len(self._unpacked))
        buffer[:size] = self._unpacked[:size]
        self._unpacked = self._unpacked[size:]
        return size

    def close(self) -> None:
        """Close the source too."""
        if not self.closed:
            self._source.close()
        super().close()

    def _unpack(self) -> None:
        if self._member is None:
            self._packed = self._packed.lstrip(b"\0")  # padding between members
            if not self._packed:
                return
            self._member = self._codec.decompressor()
        try:
            self._unpacked = memoryview(self._member.decompress(self._packed))
        except self._codec.failure as error:
            raise OSError(f"the {self._codec.name} data is damaged: {error}") from error
        self._packed = b""
        if self._member.eof:
            self._packed = self._member.unused_data
            self._member = None


class FrameFile(OutputFile):
    """An output whose rows are packed: they are in the file after `sync`, if not before."""

    holds_rows_back = True

    def __init__(self, path: str, descriptor: int, *, created: bool) -> None:
        super().__init__(path, descriptor, created=created)
        self._compress: Callable[[bytes], bytes]
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    @classmethod
    def open_packed(cls, path: str, codec: Codec, *, overwrite: bool) -> FrameFile:
        """Open an output whose frames a codec packs; errors are those of `open`."""
        file = cls.open(path, overwrite=overwrite)
        file._compress = codec.compress
        return file

    def cut(self, size: int = 0) -> None:
        """Drop what a regular file holds beyond its first `size` bytes, which end a frame."""
        self._pending.clear()
        self._pending_bytes = 0
        super().cut(size)

    def append(self, lines: bytes) -> None:
        """Take whole lines; where writing a frame fails, the file ends with its last whole one."""
        self._pending.append(lines)
        self._pending_bytes += len(lines)
        if self._pending_bytes >= FRAME_BYTES:
            self._end_frame()

    def sync(self) -> None:
        """Put on disk what was taken."""
        self._end_frame()
        super().sync()

    def _end_frame(self) -> None:
        if self._pending:
            super().append(self._compress(b"".join(self._pending)))
            self._pending.clear()
            self._pending_bytes = 0


def read_frames(stream: BinaryIO, codec: Codec, start: int = 0) -> Iterator[bytes | int]:
    """Yield the lines of all whole frames, and after each frame that ends a line its end.

    The end is a byte offset: cut there, the file holds the lines before it and no others.

    Args:
        stream: the file.
        codec: unpacks it.
        start: offset of the first frame to read.
    """
    ends = (end for _, end in _pieces(stream, codec, start) if end is not None)
    whole_end = max(ends, default=start)
    reached, rest = start, b""
    pieces = _pieces(stream, codec, start)
    while reached < whole_end:
        data, end = next(pieces)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line + b"\n"
        if end is not None:
            reached = end
            if not rest:
                yield end


def _pieces(stream: BinaryIO, codec: Codec, offset: int) -> Iterator[tuple[bytes, int | None]]:
    """Yield what is unpacked, bit by bit, with the offset where a frame ends; up to the damage."""
    stream.seek(offset)
    member, packed = None, b""
    while packed or (packed := stream.read(_OUTPUT_PIECE_BYTES)):
        member = member or codec.decompressor()
        try:
            data = member.decompress(packed)
        except codec.failure:
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
