"""The files about a run: which ones are wanted, and that each learns how the run ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cbgen import __version__
from cbgen.cli.exits import ExitCode, exit_code_of
from cbgen.errors import UsageError
from cbgen.io.output_file import journal_path
from cbgen.job.options import JobOptions
from cbgen.job.report.monitor import JobMonitor
from cbgen.job.report.statistics import JobStatistics
from cbgen.job.report.trace import TraceFile
from cbgen.recipe.schema import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class FactPaths:
    """Files about a run; None where one is not wanted."""

    stats: str | None = None
    metrics: str | None = None
    trace: str | None = None

    def named(self) -> dict[str, str]:
        """Return option -> path of those that are wanted."""
        paths = {"--stats": self.stats, "--metrics": self.metrics, "--trace": self.trace}
        return {option: path for option, path in paths.items() if path is not None}


@dataclass(slots=True)
class RunWatch:
    """Who watches a run."""

    monitor: JobMonitor
    trace: TraceFile | None
    code: ExitCode = ExitCode.FAILED
    """How the run ended; set by who knows."""


@contextmanager
def watched(
    statistics: JobStatistics, recipe: Recipe, options: JobOptions, paths: FactPaths
) -> Iterator[RunWatch]:
    """Keep the files about a run current while the context is open, and complete them at its end.

    Raises:
        UsageError: a file cannot be written, or is one of the run's own files.
    """
    _refuse_other_files(options, paths)
    monitor = JobMonitor(
        statistics,
        recipe,
        output=options.output,
        version=__version__,
        stats_path=paths.stats,
        metrics_path=paths.metrics,
    )
    trace = None if paths.trace is None else TraceFile(paths.trace)
    watch = RunWatch(monitor, trace)
    monitor.start()
    code = ExitCode.FAILED
    try:
        yield watch
        code = watch.code
    except BaseException as error:
        code = exit_code_of(error)
        raise
    finally:
        if trace is not None:
            trace.close()
        monitor.finish(code)


def _refuse_other_files(options: JobOptions, paths: FactPaths) -> None:
    """Refuse to write facts over rows, or two kinds of facts into one file."""
    taken = {os.path.realpath(name): "the input" for name in options.inputs.names}
    for name in (options.output, journal_path(options.output)):
        taken[os.path.realpath(name)] = "the output"
    for option, path in paths.named().items():
        place = os.path.realpath(path)
        if place in taken:
            raise UsageError(f"{option} {path}: that file is {taken[place]} already; name another")
        taken[place] = f"that of {option}"
