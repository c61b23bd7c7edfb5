"""The formats of files, and which of them a file has: what its name says against its first bytes.

A new format is a module of this package and an entry in FORMATS. Opens nothing. JSON text begins
with none of the signatures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from cbgen.errors import UsageError
from cbgen.io.formats.compressed import (
    Codec,
    FrameFile,
    gzip_codec,
    read_frames,
    zstd_codec,
)
from cbgen.io.formats.parquet import ParquetRows, TableFile, load_arrow, read_parquet
from cbgen.io.output.output_file import OutputFile, read_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """One format."""

    name: str
    """The name for messages."""
    suffix: str
    """How the names of its files end."""
    signatures: tuple[bytes, ...] = ()
    """What its files begin with."""
    open_output: Callable[[str, bool], OutputFile]
    """Opens an output: its path, and whether to overwrite what is there."""
    read_output: Callable[[str, int], Iterator[bytes | int]]
    """Yields the whole lines of an output from an offset on, and the offsets to cut it at."""
    check_package: Callable[[], object] = lambda: None
    """Raises UsageError where the package that the format needs is not installed."""
    codec: Callable[[], Codec] | None = None
    """Packs and unpacks its lines, where they are packed."""
    table: Callable[[BinaryIO, str], ParquetRows] | None = None
    """Reads an open file of a name, where it is a table: no lines, and no stream either."""


def _compressed(
    name: str, suffix: str, signatures: tuple[bytes, ...], codec: Callable[[], Codec]
) -> FileFormat:
    def read_output(path: str, start: int) -> Iterator[bytes | int]:
        with open(path, "rb") as stream:
            yield from read_frames(stream, codec(), start)

    return FileFormat(
        name=name,
        suffix=suffix,
        signatures=signatures,
        open_output=lambda path, overwrite: FrameFile.open_packed(path, codec(), overwrite),
        read_output=read_output,
        check_package=codec,
        codec=codec,
    )


def _read_table(path: str, start: int) -> Iterator[bytes | int]:
    """Yield all rows of a parquet output, then its size: it can be kept as a whole alone."""
    if start == 0:
        yield from read_parquet(path)
        yield os.path.getsize(path)


JSON_LINES = FileFormat(name="text", suffix="", open_output=OutputFile.open, read_output=read_lines)
_PARQUET = FileFormat(
    name="parquet",
    suffix=".parquet",
    signatures=(b"PAR1",),
    open_output=TableFile.open,
    read_output=_read_table,
    check_package=load_arrow,
    table=ParquetRows,
)
_ZSTD_SIGNATURES = (
    b"\x28\xb5\x2f\xfd",
    *(bytes((0x50 + number, 0x2A, 0x4D, 0x18)) for number in range(16)),  # skippable frames
)

FORMATS = (
    JSON_LINES,
    _compressed("gzip", ".gz", (b"\x1f\x8b",), gzip_codec),
    _compressed("zstd", ".zst", _ZSTD_SIGNATURES, zstd_codec),
    _PARQUET,
)
"""All formats; the first one is that of names without a known suffix."""

HEAD_BYTES = 512
"""As much of a file as tells what it is."""

_UNREADABLE = {
    b"ARROW1": "Arrow",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_SIGNATURES = {
    signature: kind.name for kind in FORMATS for signature in kind.signatures
} | _UNREADABLE
_REMEDIES = {
    "bzip2": "unpack it first, for example `bzcat FILE | cbgen run RECIPE -i -`",
    "xz": "unpack it first, for example `xzcat FILE | cbgen run RECIPE -i -`",
    "zip": "unpack it first, for example `unzip -p FILE | cbgen run RECIPE -i -`",
    "tar": "unpack it first and give the files that it holds",
    "Arrow": "write it as parquet or JSONL",
    "UTF-16": "save it as UTF-8, for example `iconv -f UTF-16 -t UTF-8 FILE`",
    "parquet": "give it as a file, not as a stream",
}


def format_of_name(name: str) -> FileFormat:
    """Return the format that a file's name says."""
    lower = name.lower()
    return next((kind for kind in FORMATS[1:] if lower.endswith(kind.suffix)), JSON_LINES)


def is_undecided(head: bytes) -> bool:
    """Whether the next byte of a stream may change what it is."""
    return any(
        len(head) < len(signature) and signature.startswith(head) for signature in _SIGNATURES
    )


def choose_format(head: bytes, name: str, *, is_stream: bool) -> FileFormat:
    """Return how to read a file.

    A stream has no name that counts: packed content is recognised in it. An empty file is text.

    Args:
        head: its first bytes.
        name: its name, for messages too.
        is_stream: whether it is stdin or a pipe.

    Raises:
        UsageError: the content is of another kind than the name says, or of one that is not read.
    """
    if not head:
        return JSON_LINES
    named = JSON_LINES if is_stream else format_of_name(name)
    content = _content_of(head)
    found = next((kind for kind in FORMATS if kind.name == content), None)
    if found is not None and (found is named or (is_stream and found.codec is not None)):
        return found
    if found is JSON_LINES:
        raise UsageError(
            f"{name}: is named like {named.name} data and holds none; rename it or mend it"
        )
    if found is not None and not is_stream:
        raise UsageError(
            f"{name}: holds {content} data; give it a name that ends in {found.suffix}"
        )
    raise UsageError(f"{name}: holds {content} data; {_REMEDIES[content]}")


def refuse_packed_twice(head: bytes, name: str) -> None:
    """Refuse what unpacking brought out if it is not text.

    Raises:
        UsageError: it is of another kind.
    """
    content = _content_of(head)
    if content != JSON_LINES.name:
        remedy = _REMEDIES.get(content, "unpack it once more")
        raise UsageError(f"{name}: holds {content} data inside of packed data; {remedy}")


def _content_of(head: bytes) -> str:
    """Return what a file holds that begins with these bytes; text where nothing is known of it."""
    for signature, content in _SIGNATURES.items():
        if head.startswith(signature):
            return content
    return "tar" if head[257:262] == b"ustar" else JSON_LINES.name
