"""A run over time in a bounded number of points, whether it lasts a minute or a week."""

from __future__ import annotations

from typing import Any

from cbgen.job.report.statistics import JobStatistics

MOST_POINTS = 2048


class Series:
    """A point at every tick, until there are too many: then every second, every fourth one...

    Args:
        most: points that are kept at most.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._points: list[dict[str, Any]] = []
        self._interval = 1
        self._ticks = 0

    def tick(self, statistics: JobStatistics) -> None:
        """Take note of a job, if this tick is one that counts."""
        if self._ticks % self._interval == 0:
            if len(self._points) == self._most:
                self._points = self._points[::2]
                self._interval *= 2
            if self._ticks % self._interval == 0:
                self._points.append(point(statistics))
        self._ticks += 1

    def with_last(self, statistics: JobStatistics) -> list[dict[str, Any]]:
        """Return the points and one of now."""
        return [*self._points, point(statistics)]


def point(statistics: JobStatistics) -> dict[str, Any]:
    """Return one point: seconds since the model was ready, counts since then, gauges of now."""
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
