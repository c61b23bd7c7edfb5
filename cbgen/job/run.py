"""Files to files: what the command line runs.

Importing this loads no torch: what is wrong with template and files is told before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING

from cbgen.engine.events import EngineObserver
from cbgen.errors import StoppedEarly, UsageError
from cbgen.io.reader import Record
from cbgen.io.rows import row_error
from cbgen.io.template import compile_template
from cbgen.io.writer import ClosedOutput
from cbgen.job.early_stop import EarlyStop
from cbgen.job.files import JobFiles
from cbgen.job.heap import frozen_heap, uncollected
from cbgen.job.options import JobOptions
from cbgen.job.report.statistics import JobStatistics
from cbgen.recipe.schema import Recipe

if TYPE_CHECKING:
    from cbgen.job.settings import Setting


def run_job(
    recipe: Recipe,
    options: JobOptions,
    statistics: JobStatistics,
    *,
    on_loading: Callable[[], None] = lambda: None,
    on_settings: Callable[[list[Setting]], None] | None = None,
    early_stop: EarlyStop | None = None,
    observer: EngineObserver | None = None,
) -> bool:
    """Answer every row of the inputs into the output file.

    Args:
        recipe: the checked recipe.
        options: files and limits.
        statistics: kept up to date, for a display.
        on_loading: called once, when torch is imported and the model is about to be loaded.
        on_settings: called once with the effective settings, when the model is loaded.
        early_stop: may ask the job to end before its input does.
        observer: is told what the engine does.

    Returns:
        Whether the output took every row; False if its reader closed it.

    Raises:
        UsageError: recipe, files or model are wrong, or a row is and `strict` is set.
        StoppedEarly: the job was asked to end; finished rows are in the output.
        EngineError: the engine failed; finished rows are in the output.
        OutputError: the output cannot be written any more.
    """
    template = compile_template(recipe.prompt.template)
    files = JobFiles(recipe, options, statistics)
    try:
        with files.writer:
            records: Iterator[Record] = files.records()
            if files.resumes:  # with nothing left, no model is needed
                if not (first := list(islice(records, 1))):
                    statistics.input_ended = True
                    return True
                records = chain(first, records)
            with uncollected():  # loads torch
                from cbgen.job.session import open_session
                from cbgen.job.strict import refuse_bad_rows
            on_loading()
            with open_session(recipe, template, statistics, observer) as session, frozen_heap():
                if on_settings is not None:
                    on_settings(session.settings)
                if options.strict:
                    refuse_bad_rows(recipe, options, session.preparer, session.survey)
                if early_stop is not None:
                    early_stop.attach(session.job.stop_early)
                for index, row in session.job.rows(records, on_idle=files.writer.sync_if_due):
                    if options.strict and (problem := row_error(row)) is not None:
                        raise UsageError(f"row {index}: {problem} (--strict)")
                    files.write(index, row)
                if not session.job.is_complete:
                    raise StoppedEarly("the run ended before its input did")
    except ClosedOutput:
        return False
    return True
