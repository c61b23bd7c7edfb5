"""Files to files: what the command line runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import BinaryIO

from cbgen.errors import UsageError
from cbgen.io.encode import encode_row
from cbgen.io.identity import IdIndex
from cbgen.io.reader import Record, open_input, read_records
from cbgen.io.writer import ClosedOutput, RowWriter, refuse_same_file
from cbgen.job.options import JobOptions
from cbgen.job.session import compile_template, open_session
from cbgen.job.settings import Setting
from cbgen.job.statistics import JobStatistics
from cbgen.recipe.schema import Recipe


def run_job(
    recipe: Recipe,
    options: JobOptions,
    statistics: JobStatistics,
    *,
    on_settings: Callable[[list[Setting]], None] | None = None,
) -> bool:
    """Answer every row of the input file into the output file.

    Args:
        recipe: the checked recipe.
        options: files and limits.
        statistics: kept up to date, for a display.
        on_settings: called once with the effective settings, when the model is loaded.

    Returns:
        Whether the output took every row; False if its reader closed it.

    Raises:
        UsageError: recipe, files or model are wrong, or a row is and `strict` is set.
        EngineError: the engine failed; finished rows are in the output.
        OutputError: the output cannot be written any more.
    """
    template = compile_template(recipe)
    refuse_same_file(options.input, options.output)
    stream = open_input(options.input)
    writer = RowWriter(options.output, order=recipe.output.order, overwrite=options.overwrite)
    try:
        with writer, open_session(recipe, template, statistics) as session:
            if on_settings is not None:
                on_settings(session.settings)
            records = _records(stream, options, IdIndex(recipe.output.on_duplicate_id))
            for index, row in session.job.rows(records, on_idle=writer.sync_if_due):
                if options.strict and row["error"] is not None:
                    message = row["error"]["message"]
                    raise UsageError(f"row {index}: {message} (--strict)")
                writer.write(index, encode_row(row))
                statistics.rows_written += 1
    except ClosedOutput:
        return False
    return True


def _records(stream: BinaryIO, options: JobOptions, ids: IdIndex) -> Iterator[Record]:
    """Yield the records; the thread that reads them closes the stream, as only it knows when."""
    with stream:
        for record in islice(read_records(stream, options.input), options.limit):
            yield ids.admit(record)
