"""The outputs of all shards of a run to one output, in input order.

Shards are read side by side, a buffer of each in memory, and rows are copied as they are. Every
index must be there once; if not, no output is left.
"""

from __future__ import annotations

import heapq
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, cast

from cbgen.errors import UsageError
from cbgen.io.dialects import read_outcome
from cbgen.io.formats.registry import format_of_name
from cbgen.io.input_files import ReopenedFile, is_remote, open_remote, refuse_remote_output, unpack
from cbgen.io.inputs import Shard, find_inputs
from cbgen.io.output.output_file import (
    OutputFile,
    is_stream_output,
    journal_path,
    note_output,
    replace_file,
    run_path,
)
from cbgen.io.output.run_file import RunHeader, read_run
from cbgen.io.used_files import UsedFiles

logger = logging.getLogger(__name__)

_BUFFER_BYTES = 2**16
_MOST_NAMED = 5


@dataclass(slots=True)
class IndexNotes:
    """Indexes that something is wrong with: how many, and the first of them."""

    count: int = 0
    first: list[int] = field(default_factory=list)

    def add(self, indexes: range) -> None:
        """Note indexes, which must come in order."""
        self.count += len(indexes)
        self.first.extend(indexes[: _MOST_NAMED - len(self.first)])

    def __str__(self) -> str:
        named = ", ".join(map(str, self.first))
        return named if self.count == len(self.first) else f"{named}, ..."


@dataclass(slots=True)
class MergeReport:
    """What the shards hold together."""

    num_shards: int
    num_rows: int = 0
    num_failed: int = 0
    """Rows that carry an error."""
    absent_shards: list[str] = field(default_factory=list)
    """Shards that the run was split into and that are not among the files, as `i/n`."""
    missing: IndexNotes = field(default_factory=IndexNotes)
    repeated: IndexNotes = field(default_factory=IndexNotes)

    @property
    def is_whole(self) -> bool:
        """Whether every shard and every index is there once."""
        return not (self.absent_shards or self.missing.count or self.repeated.count)


def merge_shards(output: str, shards: Sequence[str], *, overwrite: bool = False) -> MergeReport:
    """Join the outputs of shards; packed and parquet ones by their suffix.

    Args:
        output: file to write, or `-` for stdout.
        shards: files, with or without wildcards.
        overwrite: replace an existing output.

    Returns:
        What was found. The output is there if `is_whole`; stdout has the rows before the first
        fault.

    Raises:
        UsageError: a shard is not finished, torn, not in input order or no output of cbgen, or the
            output exists.
        OutputError: the output cannot be written.
        ClosedOutput: the reader of stdout has gone.
    """
    names = find_inputs(shards)
    _refuse_output(output, names, overwrite=overwrite)
    headers, num_records = _read_runs(names)
    absent_shards = _absent_shards(headers)
    report = MergeReport(len(names))

    def lines() -> Iterator[bytes]:
        nonlocal report  # a table is gone through twice
        report = MergeReport(len(names), absent_shards=absent_shards)
        return _checked_lines(names, num_records, report)

    if is_stream_output(output):
        OutputFile.open(output, overwrite=False).write_all(lines)
        return report
    stem, suffix = os.path.splitext(output)
    file = format_of_name(output).open_output(f"{stem}.merging{suffix}", True)
    done = False
    try:
        file.cut()
        file.write_all(lines)
        if report.is_whole:
            for path in (journal_path(output), run_path(output)):
                Path(path).unlink(missing_ok=True)  # of an earlier run, whose output this was
            replace_file(file.path, output)
            done = True
    finally:
        file.close() if done else file.remove()
    return report


def _checked_lines(
    names: Sequence[str], num_records: int | None, report: MergeReport
) -> Iterator[bytes]:
    """Yield the rows up to the first fault, and fill the report to the end."""
    expected = 0
    for index, line, failed in heapq.merge(*map(_rows_of, names), key=itemgetter(0)):
        report.num_rows += 1
        report.num_failed += failed
        if index < expected:
            report.repeated.add(range(index, index + 1))
            continue
        report.missing.add(range(expected, index))
        expected = index + 1
        if report.is_whole:
            yield line
    report.missing.add(range(expected, num_records or 0))


def _rows_of(name: str) -> Iterator[tuple[int, bytes, bool]]:
    """Yield index and line of each row, and whether it failed."""
    last = -1
    for number, line in enumerate(_lines_of(name), 1):
        outcome = read_outcome(line)
        if outcome is None or not line.endswith(b"\n"):
            what = "is no row of cbgen's" if line.endswith(b"\n") else "is torn"
            raise UsageError(f"{name}:{number}: {what}; finish that run with --resume first")
        if outcome.index < last:
            raise UsageError(
                f"{name}:{number}: row {outcome.index} stands behind row {last}; only outputs in "
                "input order can be merged (output.order: input)"
            )
        last = outcome.index
        yield outcome.index, line, outcome.error_code is not None


def _lines_of(name: str) -> Iterator[bytes]:
    raw = open_remote(name) if is_remote(name) else cast(BinaryIO, ReopenedFile(name))
    try:
        if (table := format_of_name(name).table) is not None:
            yield from table(raw, name).output_lines()
            return
        with unpack(raw, name, buffer_bytes=_BUFFER_BYTES) as stream:
            yield from stream
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror or error}") from error


def _read_runs(names: Sequence[str]) -> tuple[list[RunHeader], int | None]:
    """Return what OUT.run says of the shards that have one, and how many records all have read.

    The number is None if it was not noted for each.

    Raises:
        UsageError: a shard is not finished.
    """
    headers: list[RunHeader] = []
    num_records = 0
    for name in names:
        if is_remote(name):
            continue
        if not os.path.isfile(name):
            raise UsageError(f"{name}: is no file")
        run = read_run(name)
        if os.path.lexists(journal_path(name)):
            raise UsageError(f"{name}: its run has not finished; run it again with --resume first")
        if run is not None:
            header, num_read = run
            headers.append(header)
            num_records += num_read
    num_recipes = len({header.recipe_digest for header in headers})
    if num_recipes > 1:
        logger.warning("the shards were made with %d different recipes", num_recipes)
    return headers, num_records if len(headers) == len(names) else None


def _absent_shards(headers: Sequence[RunHeader]) -> list[str]:
    """Return the shards that none of the files is; none where the runs were split differently."""
    shards = [Shard.parse(header.shard) for header in headers]
    counts = {shard.count for shard in shards}
    if len(counts) != 1:
        return []
    (count,) = counts
    there = {shard.number for shard in shards}
    return [str(Shard(number, count)) for number in range(count) if number not in there]


def _refuse_output(output: str, names: Sequence[str], *, overwrite: bool) -> None:
    refuse_remote_output(output)
    if os.path.lexists(output) and not overwrite and not is_stream_output(output):
        raise UsageError(f"{output}: already exists; use --overwrite, or choose another output")
    files = UsedFiles()
    for name in names:
        if name == "-":
            raise UsageError("-: shards are read side by side; give files")
        if not is_remote(name):
            files.note_read(name, f"the input file {name}")
    note_output(files, output)
