"""Which files the inputs of a command line are: wildcards, their order, what is refused.

Opens no file.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from urllib.parse import unquote, urlsplit

from cbgen.errors import UsageError
from cbgen.io.remote import find_remote, is_remote


def find_inputs(patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the files that paths with or without wildcards name, `-` being stdin.

    They come in the order of the patterns, those of one pattern sorted so that `part-2` is before
    `part-10`. A path that exists is a file's name, whatever signs it holds.

    Raises:
        UsageError: a pattern matches no file, a path is a folder, or a file is named twice.
    """
    names: list[str] = []
    for pattern in patterns:
        names.extend(sorted(_matches(_local_path(pattern)), key=_natural_order))
    _refuse_repeated(names)
    return tuple(names)


def _local_path(pattern: str) -> str:
    """Return the path of a file:// address; other patterns as they are."""
    if not pattern.startswith("file://"):
        return pattern
    address = urlsplit(pattern.replace("?", "%3F").replace("#", "%23"))
    if address.netloc not in ("", "localhost"):
        raise UsageError(f"{pattern}: names a file on {address.netloc}; write file:///path")
    return unquote(address.path)


def _matches(pattern: str) -> list[str]:
    if is_remote(pattern):
        names = find_remote(pattern)
    elif pattern == "-" or os.path.lexists(pattern) or not glob.has_magic(pattern):
        names = [pattern]
    else:
        names = glob.glob(pattern, recursive=True)
    if not names:
        raise UsageError(f"{pattern}: matches no file")
    for name in names:
        if not is_remote(name) and os.path.isdir(name):
            raise UsageError(
                f"{name}: is a folder; name its files: '{os.path.join(name, '*.jsonl')}'"
            )
    return names


def _natural_order(name: str) -> tuple[list[tuple[str, int]], str]:
    """Return a sort key in which numbers count as numbers."""
    parts = re.findall(r"([^0-9]*)([0-9]*)", name)
    return [(text, int(digits or -1)) for text, digits in parts], name


def _refuse_repeated(names: Iterable[str]) -> None:
    seen: dict[object, str] = {}
    for name, file in ((name, _identity(name)) for name in names):
        if file in seen:
            first = seen[file]
            also = "" if first == name else f" (the same file as {first})"
            raise UsageError(f"{name}: is given twice{also}; each row would be answered twice")
        seen[file] = name


def _identity(name: str) -> object:
    """Return what two names of one file have in common."""
    if name == "-" or is_remote(name):
        return name
    try:
        status = os.stat(name)
    except OSError:  # whoever opens it says what is wrong
        return name
    return status.st_dev, status.st_ino
