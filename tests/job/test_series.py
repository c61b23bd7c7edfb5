from __future__ import annotations

from itertools import pairwise

from cbgen.job.report.series import Series
from cbgen.job.report.statistics import JobStatistics


def ticked(ticks: int, most: int) -> list[int]:
    """Return the row counts of the points after so many ticks, a row each."""
    series, statistics = Series(most), JobStatistics()
    for tick in range(ticks):
        statistics.rows_answered = tick
        series.tick(statistics)
    return [point["rows"] for point in series.with_last(statistics)]


def test_a_short_run_has_a_point_for_every_tick():
    assert ticked(5, most=8) == [0, 1, 2, 3, 4, 4]


def test_a_long_run_has_fewer_points_evenly_apart():
    assert ticked(10, most=8) == [0, 2, 4, 6, 8, 9]
    assert ticked(17, most=8) == [0, 4, 8, 12, 16, 16]


def test_the_number_of_points_is_bounded_for_a_week():
    points = ticked(7 * 24 * 3600, most=2048)
    assert 1024 <= len(points) <= 2049
    steps = {second - first for first, second in pairwise(points[:-1])}
    assert len(steps) == 1
