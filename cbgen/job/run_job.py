"""Files to files: what `cbgen run` runs.

Loads no torch until files and template are checked: what is wrong with them is told before that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from typing import Any

from cbgen.engine.events import EngineObserver
from cbgen.errors import StoppedEarly, UsageError
from cbgen.io.input_files import refuse_remote_output
from cbgen.io.json_values import encode_row
from cbgen.io.output.finished_rows import FinishedRows, holds_rows
from cbgen.io.output.output_file import ClosedOutput, is_stream_output
from cbgen.io.output.run_file import RunFile
from cbgen.io.output.writer import RowWriter
from cbgen.io.records import Record
from cbgen.io.template import compile_template
from cbgen.job.gc_pauses import gc_ignores_existing_objects, gc_paused
from cbgen.job.options import JobOptions, row_source
from cbgen.job.report.statistics import JobStatistics
from cbgen.job.resume import checked_records, finished_rows, header_of
from cbgen.job.settings import Setting
from cbgen.recipe.schema import Recipe

logger = logging.getLogger(__name__)


class EarlyStop:
    """Asks a job to end before its input does. All methods are thread-safe.

    A signal or a time limit may come while the model is still loaded: what was asked before there
    is a job is passed on when there is one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._grace: float | None = None
        self._stop_job: Callable[[float], None] | None = None
        self.is_importing = False
        """Whether no exception may be raised in the main thread now."""

    @property
    def has_job(self) -> bool:
        """Whether there is a job that can be asked; before that, only an exception ends a run."""
        return self._stop_job is not None

    def ask(self, grace: float = 0.0) -> None:
        """Let the job end, with `grace` seconds for the rows that run; again for less grace."""
        with self._lock:
            self._grace = grace
            stop_job = self._stop_job
        if stop_job is not None:
            stop_job(grace)

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Let signals wait: an exception amid the set-up of an extension may end the process.

        Raises:
            StoppedEarly: the run was asked to end meanwhile.
        """
        self.is_importing = True
        try:
            yield
        finally:
            self.is_importing = False
        if self._grace is not None:
            raise StoppedEarly("the run was asked to end before it began")

    def attach(self, stop_job: Callable[[float], None]) -> None:
        """Call `stop_job` with the grace of every `ask`, at once for an earlier one."""
        with self._lock:
            self._stop_job = stop_job
            grace = self._grace
        if grace is not None:
            stop_job(grace)


def run_job(
    recipe: Recipe,
    options: JobOptions,
    statistics: JobStatistics,
    *,
    on_loading: Callable[[], None] = lambda: None,
    on_settings: Callable[[list[Setting]], None] = lambda _settings: None,
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
            early_stop = early_stop or EarlyStop()
            with early_stop.importing(), gc_paused():  # loads torch
                from cbgen.job.dry_run import refuse_bad_rows
                from cbgen.job.open_job import open_job
            on_loading()
            with (
                open_job(recipe, template, statistics, observer) as opened,
                gc_ignores_existing_objects(),
            ):
                on_settings(opened.settings)
                if options.strict:
                    refuse_bad_rows(recipe, options, opened.preparer, opened.plan)
                early_stop.attach(opened.job.stop_early)
                for index, row in opened.job.rows(
                    records, on_idle=files.writer.sync_if_due, strict=options.strict
                ):
                    files.write(index, row)
                if not opened.job.is_complete:
                    raise StoppedEarly("the run ended before its input did")
    except ClosedOutput:
        return False
    return True


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
        self._source = row_source(recipe, options.inputs, options.input_format)
        self._finished: FinishedRows | None = None
        self._run: RunFile | None = None
        _check_output(options)
        with ExitStack() as on_failure:
            if not is_stream_output(options.output):
                self._run = RunFile.open(options.output, header_of(recipe, options))
                on_failure.callback(self._run.remove_if_created)
                if options.resume and holds_rows(options.output):
                    self._finished = finished_rows(recipe, options, self._run, statistics)
                else:
                    self._run.forget()
            self.writer = RowWriter(
                options.output,
                order=recipe.output.order,
                overwrite=options.overwrite or options.resume,
                finished=self._finished,
                run=self._run,
            )
            on_failure.pop_all()

    @property
    def resumes(self) -> bool:
        """Whether an earlier run left rows."""
        return self._finished is not None

    def records(self) -> Iterator[Record]:
        """Yield the records that no row answers yet. To be called once, on any thread.

        Raises:
            UsageError: an input cannot be read, or is another one than the run before had.
        """
        records = self._source.records()
        if self._run is None:
            yield from records
            return
        answered = () if self._finished is None else self._finished.answered
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
    if not options.resume:
        return
    if options.overwrite:
        raise UsageError("--resume goes on with an output and --overwrite replaces it; give one")
    if is_stream_output(options.output):
        raise UsageError("--resume needs an output file: -o FILE; what a pipe got is gone")
