"""Keeps the files of `--stats` and `--metrics` current while a job runs, on a thread of its own.

A file that cannot be written any more gives one warning, and the job goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from cbgen.errors import OutputError
from cbgen.io.json_values import encode_row
from cbgen.io.output.atomic_file import AtomicFile
from cbgen.job.report.prometheus import metrics_text
from cbgen.job.report.statistics import JobStatistics
from cbgen.job.report.stats_json import Series, package_versions, stats_object
from cbgen.job.settings import Setting, every_setting
from cbgen.recipe.schema import Recipe

logger = logging.getLogger(__name__)

_TICK_SECONDS = 1.0
_METRICS_SECONDS = 5.0
_STATS_SECONDS = 10.0


class ReportWriter:
    """Writes the files of `--stats` and `--metrics`; either may be missing.

    Args:
        statistics: of the job.
        recipe: whose settings the statistics list.
        output: path of the rows.
        version: of cbgen.
        stats_path: file for `--stats`.
        metrics_path: file for `--metrics`.

    Raises:
        UsageError: a file cannot be written.
    """

    def __init__(
        self,
        statistics: JobStatistics,
        recipe: Recipe,
        *,
        output: str,
        version: str,
        stats_path: str | None = None,
        metrics_path: str | None = None,
    ) -> None:
        self._statistics = statistics
        self._recipe = recipe
        self._output = output
        self._reports: list[tuple[AtomicFile, float, Callable[[int | None], bytes]]] = []
        """Each file, the seconds between two versions of it, and its content for an exit code."""
        if stats_path is not None:
            file = AtomicFile(stats_path, "--stats")
            self._reports.append((file, _STATS_SECONDS, self._stats_json))
        if metrics_path is not None:
            file = AtomicFile(metrics_path, "--metrics")
            self._reports.append((file, _METRICS_SECONDS, self._metrics_text))
        self._settings = every_setting(recipe, ())
        self._versions = package_versions(version)
        self._series = Series()
        self._failed: set[AtomicFile] = set()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cbgen-report", daemon=True)

    def start(self) -> None:
        """Start the thread, unless no file is wanted."""
        if self._reports:
            self._thread.start()

    def take_settings(self, effective: Sequence[Setting]) -> None:
        """Take the settings that were decided once the model was loaded."""
        self._settings = every_setting(self._recipe, effective)

    def finish(self, exit_code: int) -> None:
        """Stop the thread and write the files a last time."""
        self._ends.set()
        if self._thread.ident is not None:
            self._thread.join()
        for file, _, content in self._reports:
            self._replace(file, content(exit_code))

    def _run(self) -> None:
        due = dict.fromkeys(self._reports, time.monotonic())
        while True:
            now = time.monotonic()
            if self._statistics.run_started is not None:
                self._series.tick(self._statistics)
            for report, moment in due.items():
                if now >= moment:
                    file, interval, content = report
                    self._replace(file, content(None))
                    due[report] = now + interval
            if self._ends.wait(_TICK_SECONDS):
                return

    def _stats_json(self, exit_code: int | None) -> bytes:
        content = stats_object(
            self._statistics,
            exit_code=exit_code,
            series=self._series.with_last(self._statistics),
            settings=self._settings,
            versions=self._versions,
        )
        return encode_row(content)

    def _metrics_text(self, exit_code: int | None) -> bytes:
        text = metrics_text(self._statistics, self._output, exit_code)
        return text.encode("utf-8", "backslashreplace")

    def _replace(self, file: AtomicFile, content: bytes) -> None:
        try:
            file.replace(content)
        except OutputError as error:
            if file not in self._failed:
                logger.warning("%s; the run goes on", error)
            self._failed.add(file)
