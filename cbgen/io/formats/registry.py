"""The formats of files, and which of them a file has: what its name says against its first bytes.

A new format is a module of this package and an entry in FORMATS. Opens nothing. JSON text begins
with none of the signatures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from cbgen.errors import UsageError
from cbgen.io.formats.compressed import GZIP, ZSTD, Compressed
from cbgen.io.formats.jsonl import JSON_LINES
from cbgen.io.formats.parquet import PARQUET
from cbgen.io.output.output_file import RowOutput


class FileFormat(Protocol):
    """What a format has to say of itself; how its input is read is up to input_files."""

    @property
    def name(self) -> str:
        """The name for messages."""

    @property
    def suffix(self) -> str:
        """How the names of its files end."""

    @property
    def signatures(self) -> tuple[bytes, ...]:
        """What its files begin with."""

    def check_package(self) -> None:
        """Refuse the format where the package that it needs is not installed."""

    def open_output(self, path: str, *, overwrite: bool) -> RowOutput:
        """Open an output."""

    def read_output(self, path: str, start: int = 0) -> Iterator[bytes | int]:
        """Yield the whole lines of an output from an offset on, and the offsets to cut it at."""


FORMATS: tuple[FileFormat, ...] = (JSON_LINES, GZIP, ZSTD, PARQUET)
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
    if found is not None and (found is named or (is_stream and isinstance(found, Compressed))):
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
