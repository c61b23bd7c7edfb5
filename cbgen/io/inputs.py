"""All inputs of a run as one sequence of records: several files, of any format, one shard of them.

Files are opened one after another, by the thread that reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from cbgen.errors import UsageError
from cbgen.io.content import format_of_name
from cbgen.io.opening import check_input, is_stream, open_input, open_raw
from cbgen.io.parquet import ParquetRows, load_arrow
from cbgen.io.paths import find_inputs
from cbgen.io.reader import Record, read_records, records_from
from cbgen.io.remote import is_remote
from cbgen.io.shard import Shard

_COUNTED_BYTES = 2**20


class Inputs:
    """Files whose records count as one sequence. Made by `open_inputs`.

    Args:
        names: the files, `-` for stdin.
        limit: records to take, counted before they are shared out; None = all.
        shard: which of them this process takes.
    """

    def __init__(
        self, names: tuple[str, ...], *, limit: int | None = None, shard: Shard | None = None
    ) -> None:
        self.names = names
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
        return islice(self._read_files(), self.limit)

    @property
    def max_records(self) -> int | None:
        """Records that `records` gives at most; None where there is no limit."""
        return None if self.limit is None else self.shard.size(self.limit)

    def count(self) -> int | None:
        """Return how many records `records` will give, blank lines included.

        Reads all files; None where one can be read but once, is far away, or cannot be read.
        """
        total = 0
        for name in self.names:
            if is_remote(name) or is_stream(name):
                return None
            try:
                total += _count_rows(name)
            except (OSError, UsageError):
                return None  # whoever reads the records says what is wrong
        return self.shard.size(total if self.limit is None else min(total, self.limit))

    def _read_files(self) -> Iterator[Record]:
        next_index = 0
        for name in self.names:
            for record in _read_file(name, next_index):
                yield record
                next_index = record.index + 1


def open_inputs(
    patterns: Sequence[str], *, limit: int | None = None, shard: Shard | None = None
) -> Inputs:
    """Find the inputs and refuse what can be refused before anything is read.

    Args:
        patterns: paths, with or without wildcards; `-` is stdin.
        limit: records to take, counted before they are shared out; None = all.
        shard: which of them this process takes; None = all.

    Raises:
        UsageError: a pattern matches nothing, a file is a folder, is named twice, cannot be opened,
            or holds something else than its name says.
    """
    names = find_inputs(patterns)
    for name in names:
        check_input(name)
        if format_of_name(name) != "parquet":
            continue
        if is_remote(name):
            load_arrow()
            continue
        with open_raw(name) as raw:
            ParquetRows(raw, name)
    return Inputs(names, limit=limit, shard=shard)


def _read_file(name: str, first_index: int) -> Iterator[Record]:
    if format_of_name(name) == "parquet":
        with open_raw(name) as raw:
            rows = ParquetRows(raw, name)
            yield from records_from(rows.lines(), name, first_index=first_index)
    else:
        with open_input(name) as stream:
            yield from read_records(stream, name, first_index=first_index)


def _count_rows(name: str) -> int:
    if format_of_name(name) == "parquet":
        with open_raw(name) as raw:
            return ParquetRows(raw, name).num_rows
    with open_input(name) as stream:
        num_lines, last = 0, b"\n"
        while chunk := stream.read(_COUNTED_BYTES):
            num_lines += chunk.count(b"\n")
            last = chunk[-1:]
        return num_lines + (last != b"\n")
