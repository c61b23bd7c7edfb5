"""All inputs of a run as one sequence of records: several files, of any format, one shard of them.

Finds the files that the patterns of a command line name. They are opened one after another, by the
thread that reads them.
"""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from urllib.parse import unquote, urlsplit

from cbgen.errors import UsageError
from cbgen.io.input_files import (
    check_input,
    count_rows,
    find_remote,
    is_remote,
    is_stream,
    read_rows,
)
from cbgen.io.records import Record, records_from
from cbgen.io.used_files import identity


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `number` (from 0) of `count`; by default all records.

    Record `index` belongs to shard `index % count`. Indexes stay those of the whole input, so that
    the outputs can be joined; the output of a shard holds its rows at positions 0, 1, 2, ...
    """

    number: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read `i/n`.

        Raises:
            UsageError: it is not two numbers, or there is no such shard.
        """
        match = re.fullmatch(r"([0-9]{1,18})/([0-9]{1,18})", text)
        if match is None:
            raise UsageError(f"--shard {text}: expected i/n, such as 0/8 for the first of eight")
        number, count = map(int, match.groups())
        if count == 0:
            raise UsageError(f"--shard {text}: there must be at least one shard")
        if number >= count:
            raise UsageError(
                f"--shard {text}: shards are counted from 0, so {count} of them are 0/{count} to "
                f"{count - 1}/{count} (in Slurm: --array=0-{count - 1})"
            )
        return cls(number, count)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def takes(self, index: int) -> bool:
        """Whether a record belongs to this shard."""
        return index % self.count == self.number

    def position(self, index: int) -> int:
        """Return how many records of this shard come before one of its own."""
        return index // self.count

    def size(self, num_records: int) -> int:
        """Return how many of the first `num_records` records belong to this shard."""
        return (num_records - self.number + self.count - 1) // self.count


class Inputs:
    """Files whose records count as one sequence.

    What can be refused before anything is read is refused when it is made.

    Args:
        patterns: paths, with or without wildcards; `-` is stdin.
        limit: records to take, counted before they are shared out; None = all.
        shard: which of them this process takes; None = all.

    Raises:
        UsageError: a pattern matches nothing, a file is a folder, is named twice, cannot be opened,
            or holds something else than its name says.
    """

    def __init__(
        self, patterns: Sequence[str], *, limit: int | None = None, shard: Shard | None = None
    ) -> None:
        self.names = find_inputs(patterns)
        for name in self.names:
            check_input(name)
        self.limit = limit
        self.shard = shard or Shard()

    def records(self) -> Iterator[Record]:
        """Yield the records of the shard as they are read.

        Raises:
            UsageError: an input cannot be read; every record before that was given.
        """
        return (record for record in self.all_records() if self.shard.takes(record.index))

    def all_records(self) -> Iterator[Record]:
        """Yield the records of all shards, up to the limit; errors are those of `records`."""
        return islice(
            self._read_files(), None if self.limit is None else min(self.limit, sys.maxsize)
        )

    @property
    def max_records(self) -> int | None:
        """Records that `records` gives at most; None if there is no limit."""
        return None if self.limit is None else self.shard.size(self.limit)

    def count(self) -> int | None:
        """Return how many records `records` will give, blank lines included.

        Reads all files; None if one can be read but once, is far away, or cannot be read.
        """
        total = 0
        for name in self.names:
            if is_remote(name) or is_stream(name):
                return None
            try:
                total += count_rows(name)
            except (OSError, UsageError):
                return None  # whoever reads the records says what is wrong
        return self.shard.size(total if self.limit is None else min(total, self.limit))

    def _read_files(self) -> Iterator[Record]:
        next_index = 0
        for name in self.names:
            for record in records_from(read_rows(name), name, first_index=next_index):
                yield record
                next_index = record.index + 1


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
    for name in names:
        file = name if is_remote(name) else identity(name, 0) or name
        if file in seen:
            first = seen[file]
            also = "" if first == name else f" (the same file as {first})"
            raise UsageError(f"{name}: is given twice{also}; each row would be answered twice")
        seen[file] = name
