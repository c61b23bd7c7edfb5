"""Packed content for tests."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import zstandard


def pack(data: bytes, kind: str) -> bytes:
    """Return one gzip member or zstd frame."""
    if kind == "gzip":
        return gzip.compress(data, mtime=0)
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def unpack(data: bytes, kind: str) -> bytes:
    """Return what all members or frames hold."""
    if kind == "gzip":
        return gzip.decompress(data)
    stream = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True)
    return stream.read()


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> str:
    """Write a parquet file of named columns and return its path."""
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
    return str(path)
