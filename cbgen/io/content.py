"""What the first bytes of a file say it holds, against what its name says.

Only names and bytes: opens nothing. JSON text begins with none of the signatures.
"""

from __future__ import annotations

from cbgen.errors import UsageError

HEAD_BYTES = 512
"""As much of a file as tells what it is."""

_SIGNATURES = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    **{bytes((0x50 + number, 0x2A, 0x4D, 0x18)): "zstd" for number in range(16)},  # skippable frame
    b"PAR1": "parquet",
    b"ARROW1": "Arrow",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_SUFFIXES = {".gz": "gzip", ".zst": "zstd", ".parquet": "parquet"}
_PACKED = ("gzip", "zstd")
_REMEDIES = {
    "bzip2": "unpack it first, for example `bzcat FILE | cbgen run RECIPE -i -`",
    "xz": "unpack it first, for example `xzcat FILE | cbgen run RECIPE -i -`",
    "zip": "unpack it first, for example `unzip -p FILE | cbgen run RECIPE -i -`",
    "tar": "unpack it first and give the files that it holds",
    "Arrow": "write it as parquet or JSONL",
    "UTF-16": "save it as UTF-8, for example `iconv -f UTF-16 -t UTF-8 FILE`",
    "parquet": "give it as a file, not as a stream",
}


def format_of_name(name: str) -> str:
    """Return gzip, zstd, parquet or text."""
    lower = name.lower()
    for suffix, kind in _SUFFIXES.items():
        if lower.endswith(suffix):
            return kind
    return "text"


def format_of_content(head: bytes) -> str:
    """Return what a file is that begins with these bytes; text where nothing is known of it."""
    for signature, kind in _SIGNATURES.items():
        if head.startswith(signature):
            return kind
    return "tar" if head[257:262] == b"ustar" else "text"


def is_undecided(head: bytes) -> bool:
    """Whether the next byte of a stream may change what it is."""
    return any(
        len(head) < len(signature) and signature.startswith(head) for signature in _SIGNATURES
    )


def choose_format(head: bytes, name: str, *, is_stream: bool) -> str:
    """Return how to read a file: as text, gzip, zstd or parquet.

    A stream has no name that counts: packed content is recognised in it. An empty file is text.

    Args:
        head: its first bytes.
        name: its name, for messages too.
        is_stream: whether it is stdin or a pipe.

    Raises:
        UsageError: the content is of another kind than the name says, or of one that is not read.
    """
    if not head:
        return "text"
    named, found = "text" if is_stream else format_of_name(name), format_of_content(head)
    if found == named or (is_stream and found in _PACKED):
        return found
    if found == "text":
        raise UsageError(f"{name}: is named like {named} data and holds none; rename it or mend it")
    if not is_stream and found in _SUFFIXES.values():
        suffix = next(suffix for suffix, kind in _SUFFIXES.items() if kind == found)
        raise UsageError(f"{name}: holds {found} data; give it a name that ends in {suffix}")
    raise UsageError(f"{name}: holds {found} data; {_REMEDIES[found]}")


def refuse_packed_twice(head: bytes, name: str) -> None:
    """Refuse what unpacking brought out if it is not text.

    Raises:
        UsageError: it is of another kind.
    """
    found = format_of_content(head)
    if found != "text":
        remedy = _REMEDIES.get(found, "unpack it once more")
        raise UsageError(f"{name}: holds {found} data inside of packed data; {remedy}")
