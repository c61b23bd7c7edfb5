"""The object that `--stats` writes: what a run did, in numbers, and under which settings."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cbgen.job.report.statistics import JobStatistics

_PACKAGES = ("torch", "transformers", "tokenizers")
_MAX_POINTS = 2048


def stats_object(
    statistics: JobStatistics,
    *,
    exit_code: int | None,
    series: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Return everything about a run, to be written as JSON; `exit_code` None while it runs."""
    engine, seconds = statistics.engine, statistics.run_seconds
    rates = {  # since the model was ready
        "rows_per_s": statistics.rows_done,
        "prompt_tokens_per_s": statistics.prompt_tokens,
        "completion_tokens_per_s": statistics.completion_tokens,
    }
    return {
        "exit_code": exit_code,
        "rows": {
            "read": statistics.rows_read,
            "answered": statistics.rows_answered,
            "failed": statistics.rows_failed,
            "resumed": statistics.rows_resumed,
        },
        "finish_reasons": dict(statistics.finish_reasons),
        "errors": dict(statistics.errors),
        "tokens": statistics.tokens,
        "seconds": {
            "load": round(statistics.load_seconds, 3),
            "run": round(seconds, 3),
        },
        "rates": {
            name: round(number / seconds, 3) if seconds > 0 else 0.0
            for name, number in rates.items()
        },
        "cache": {
            "blocks": engine.num_blocks,
            "peak_used": engine.peak_used_blocks,
            "evictions": engine.num_evictions,
            "preemptions": engine.num_preemptions,
            "offloaded": engine.num_offloaded_blocks,
        },
        "series": list(series),
        "settings": dict(settings),
        "versions": dict(versions),
    }


class Series:
    """A run over time, in a bounded number of points however long it lasts.

    There is a point for every tick; when there are too many, for every second one, then for every
    fourth one, and so on.

    Args:
        max_points: points that are kept at most.
    """

    def __init__(self, max_points: int = _MAX_POINTS) -> None:
        self._max_points = max_points
        self._points: list[dict[str, Any]] = []
        self._interval = 1
        self._ticks = 0

    def tick(self, statistics: JobStatistics) -> None:
        """Add a point for this moment, unless the interval between points is longer than a tick."""
        if self._ticks % self._interval == 0:
            if len(self._points) == self._max_points:
                self._points = self._points[::2]
                self._interval *= 2
            if self._ticks % self._interval == 0:
                self._points.append(_point(statistics))
        self._ticks += 1

    def with_last(self, statistics: JobStatistics) -> list[dict[str, Any]]:
        """Return the points so far and one for this moment."""
        return [*self._points, _point(statistics)]


def _point(statistics: JobStatistics) -> dict[str, Any]:
    """Return seconds and counts since the model was ready, and the gauges of this moment."""
    engine = statistics.engine
    return {
        "seconds": round(statistics.run_seconds, 3),
        "rows": statistics.rows_done,
        "steps": engine.num_steps,
        "computed_tokens": engine.num_computed_tokens,
        "generated_tokens": engine.num_generated_tokens,
        "running": engine.num_running,
        "waiting": engine.num_waiting,
        "used_blocks": engine.num_used_blocks,
    }


def package_versions(own: str) -> dict[str, str]:
    """Return the versions of cbgen, of Python, and of the packages that make the answers."""
    versions = {"cbgen": own, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
