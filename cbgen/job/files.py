"""The files of one run: the records that are left to answer, and where their rows go.

Loads no torch: whatever is wrong with the files is found before the model is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from cbgen.errors import UsageError
from cbgen.io.earlier import EarlierRows, holds_rows
from cbgen.io.encode import encode_row
from cbgen.io.output_file import is_device
from cbgen.io.reader import Record
from cbgen.io.remote import refuse_remote_output
from cbgen.io.row_source import RowSource
from cbgen.io.run_file import RunFile
from cbgen.io.writer import RowWriter, refuse_same_file
from cbgen.job.options import JobOptions
from cbgen.job.report.statistics import JobStatistics
from cbgen.job.resume import checked_records, earlier_rows, header_of
from cbgen.recipe.schema import Recipe

logger = logging.getLogger(__name__)


class JobFiles:
    """Input and output of a run.

    Args:
        recipe: of the run.
        options: of the run.
        statistics: counts what is read and written.

    Raises:
        UsageError: the files are wrong, or `resume` is asked for and the output is another run's.
    """

    def __init__(self, recipe: Recipe, options: JobOptions, statistics: JobStatistics) -> None:
        self._inputs = options.inputs
        self._statistics = statistics
        self._source = RowSource.of_inputs(
            options.inputs,
            on_duplicate_id=recipe.output.on_duplicate_id,
            input_format=options.input_format,
        )
        self._earlier: EarlierRows | None = None
        _check_output(options)
        self._run = _open_run(recipe, options)
        opened = False
        try:
            if self._run is not None:
                if options.resume and holds_rows(options.output):
                    self._earlier = earlier_rows(recipe, options, self._run, statistics)
                else:
                    self._run.forget()
            self.writer = RowWriter(
                options.output,
                order=recipe.output.order,
                overwrite=options.overwrite or options.resume,
                earlier=self._earlier,
                run=self._run,
            )
            opened = True
        finally:
            if not opened and self._run is not None:
                self._run.remove_if_created()

    @property
    def resumes(self) -> bool:
        """Whether an earlier run left rows."""
        return self._earlier is not None

    def records(self) -> Iterator[Record]:
        """Yield the records that no row answers yet. To be called once, on any thread.

        Raises:
            UsageError: an input cannot be read, or is another one than the run before had.
        """
        records = self._source.records()
        if self._run is None:
            yield from records
            return
        answered = () if self._earlier is None else self._earlier.answered
        num_known, had_ended = self._run.num_known, self._run.has_ended
        for position, record in checked_records(records, self._run, self._inputs):
            if position == num_known and had_ended:
                logger.warning(
                    "%s: the input has grown: the run before read %d rows, and it goes on",
                    record.place,
                    num_known,
                )
            if position in answered:
                self._statistics.rows_read += 1
            else:
                yield record
        if self._inputs.limit is None or self._source.num_read < self._inputs.limit:
            self._run.note_end()

    def write(self, index: int, row: dict[str, Any]) -> None:
        """Write the row of the record with an index.

        Raises:
            OutputError: it cannot be written.
            ClosedOutput: the reader of the pipe has gone.
        """
        self.writer.write(self._inputs.shard.position(index), encode_row(row))
        self._statistics.rows_written += 1


def _check_output(options: JobOptions) -> None:
    refuse_remote_output(options.output)
    for name in options.inputs.names:
        refuse_same_file(name, options.output)
    if not options.resume:
        return
    if options.overwrite:
        raise UsageError("--resume goes on with an output and --overwrite replaces it; give one")
    if _is_stream(options.output):
        raise UsageError("--resume needs an output file: -o FILE; what a pipe got is gone")


def _open_run(recipe: Recipe, options: JobOptions) -> RunFile | None:
    if _is_stream(options.output):
        return None
    return RunFile.open(options.output, header_of(recipe, options))


def _is_stream(output: str) -> bool:
    return output in ("-", "/dev/stdout") or is_device(output)
