"""gzip and zstd files: members and frames one after another, read and written in little memory.

Output is packed into frames that end where rows end. Where such a file is torn, everything before
the torn frame is intact.
"""

from __future__ import annotations

import contextlib
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


class _DamagedData(OSError):
    """What is torn or damaged, and for which reason."""


def unpacked_stream(packed: io.BufferedReader[PieceStream], codec: Codec) -> PieceStream:
    """Return the content of a packed stream; closing it closes that."""
    pieces = _unpacked(packed.read1, codec, _INPUT_PIECE_BYTES)
    return PieceStream((data for data, _ in pieces), packed)


def _unpacked(
    read: Callable[[int], bytes], codec: Codec, piece_bytes: int, offset: int = 0
) -> Iterator[tuple[bytes, int | None]]:
    """Yield what is unpacked, bit by bit, with the offset where a member or frame ends.

    What is torn or damaged raises _DamagedData once all bytes before it were given.
    """
    member: _Decompressor | None = None
    packed = b""
    while packed or (packed := read(piece_bytes)):
        offset += len(packed)
        if member is None:
            packed = packed.lstrip(b"\0")  # padding between members
            if not packed:
                continue
            member = codec.decompressor()
        try:
            data = member.decompress(packed)
        except codec.failure as error:
            raise _DamagedData(f"the {codec.name} data is damaged: {error}") from error
        packed = b""
        if member.eof:
            packed = member.unused_data
            offset -= len(packed)
            member = None
        yield data, None if member else offset
    if member is not None:
        raise _DamagedData(f"the {codec.name} data ends in the middle; its rest is missing")


class PieceStream(io.RawIOBase):
    """The bytes of pieces, one after another.

    An OSError of whatever yields them is raised once all bytes before it were given.

    Args:
        pieces: the bytes.
        source: is closed with the stream.
    """

    def __init__(
        self, pieces: Iterator[bytes], source: BinaryIO | io.BufferedReader[PieceStream]
    ) -> None:
        self._pieces = pieces
        self._source = source
        self._rest = memoryview(b"")
        self._failure: OSError | None = None

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401  any writable buffer
        """Fill the buffer with what is there; 0 at the end."""
        while not self._rest:
            if self._failure is not None:
                raise self._failure  # to a reader that asks again too
            try:
                piece = next(self._pieces, None)
            except OSError as error:
                self._failure = error
                raise
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size

    def close(self) -> None:
        """Close the source too."""
        if not self.closed:
            self._source.close()
        super().close()


class FrameFile(OutputFile):
    """An output whose rows are packed: they are in the file after `sync`, if not before."""

    holds_rows_back = True

    _compress: Callable[[bytes], bytes]

    def __init__(self, path: str, descriptor: int, *, created: bool) -> None:
        super().__init__(path, descriptor, created=created)
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    @classmethod
    def open_packed(cls, path: str, codec: Codec, overwrite: bool) -> FrameFile:
        """Open an output whose frames a codec packs; errors are those of `open`."""
        file = cls.open(path, overwrite)
        file._compress = codec.compress
        return file

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

    The end is a byte offset: cut there, the file holds the lines before it and no others. One frame
    is in memory at a time.

    Args:
        stream: the file.
        codec: unpacks it.
        start: offset of the first frame to read.
    """
    stream.seek(start)
    lines: list[bytes] = []
    rest = b""
    with contextlib.suppress(_DamagedData):
        for data, end in _unpacked(stream.read, codec, _OUTPUT_PIECE_BYTES, start):
            *whole, rest = (rest + data).split(b"\n")
            lines += whole
            if end is not None:
                yield from (line + b"\n" for line in lines)
                lines.clear()
                if not rest:
                    yield end
