"""Input in object stores and elsewhere, by fsspec: paths such as s3://bucket/rows.jsonl.gz.

Owns the words for what goes wrong there. Output is not written to such places: a row is safe once
the file system has it, and an object store takes whole files alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from cbgen.errors import UsageError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


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
