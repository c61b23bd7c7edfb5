"""gzip and zstd data to bytes, as a stream: members and frames one after another, in little memory.

Knows nothing of lines. What is torn or damaged raises OSError once all bytes before it were given.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from typing import Any, Protocol

from cbgen.errors import UsageError

_PIECE_BYTES = 1024
"""Packed bytes unpacked at a time: at most 32 MiB come out of them, nearly always far less."""


class _Decompressor(Protocol):
    """One member or frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


class UnpackedStream(io.RawIOBase):
    """The content of a packed stream, which is closed with it.

    Args:
        source: packed bytes.
        kind: gzip or zstd.

    Raises:
        UsageError: the package that unpacks them is not installed.
    """

    def __init__(self, source: io.BufferedIOBase, kind: str) -> None:
        self._source = source
        self._kind = kind
        self._make, self._error = _ZLIB if kind == "gzip" else load_zstd()
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
            self._packed = self._packed or self._source.read1(_PIECE_BYTES)
            if not self._packed:
                if self._member is not None:
                    raise OSError(f"the {self._kind} data ends in the middle; its rest is missing")
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
            self._member = self._make()
        try:
            self._unpacked = memoryview(self._member.decompress(self._packed))
        except self._error as error:
            raise OSError(f"the {self._kind} data is damaged: {error}") from error
        self._packed = b""
        if self._member.eof:
            self._packed = self._member.unused_data
            self._member = None


def _gzip_member() -> _Decompressor:
    return zlib.decompressobj(wbits=31)


_ZLIB: tuple[Callable[[], _Decompressor], type[Exception]] = (_gzip_member, zlib.error)


def load_zstd() -> tuple[Callable[[], _Decompressor], type[Exception]]:
    """Return what makes a decompressor of one frame, and what it raises.

    Raises:
        UsageError: zstandard is not installed.
    """
    try:
        import zstandard
    except ImportError as error:
        raise UsageError(
            ".zst files need the package zstandard: pip install 'cbgen[zstd]'"
        ) from error
    return zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
