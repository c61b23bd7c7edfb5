"""The object of --stats has the documented fields, and its numbers are the run's."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from cbgen.engine.events import StepStats
from cbgen.job.report.statistics import JobStatistics
from cbgen.job.report.stats_json import Series, package_versions, stats_object
from cbgen.job.settings import Setting, every_setting
from cbgen.recipe.load import recipe_from_mapping

RECIPE = {
    "model": {"path": "some/model"},
    "generation_config": {"temperature": 0.5},
    "continuous_batching_config": {"page_size": 32},
}


@pytest.fixture
def recipe():
    return recipe_from_mapping(RECIPE, ["output.order=completion"])


def make_stats(statistics: JobStatistics, exit_code: int | None = 0) -> dict:
    return stats_object(statistics, exit_code=exit_code, series=(), settings={}, versions={})


def test_the_fields_are_the_documented_ones():
    stats = make_stats(JobStatistics())
    assert list(stats) == [
        "exit_code", "rows", "finish_reasons", "errors", "tokens", "seconds", "rates", "cache",
        "series", "settings", "versions",
    ]  # fmt: skip
    assert list(stats["rows"]) == ["read", "answered", "failed", "resumed"]
    assert list(stats["tokens"]) == ["prompt", "cached", "completion", "recomputed"]
    assert list(stats["seconds"]) == ["load", "run"]
    cache = ["blocks", "peak_used", "evictions", "preemptions", "offloaded"]
    assert list(stats["cache"]) == cache


def test_the_numbers_are_those_of_the_job():
    statistics = JobStatistics(rows_read=4, run_started=10.0, run_ended=12.0, load_seconds=3.0)
    statistics.count_answer(["stop"], prompt_tokens=10, completion_tokens=6)
    statistics.count_answer(["length"], prompt_tokens=20, completion_tokens=4)
    statistics.count_failure("no_prompt")
    statistics.engine = StepStats(num_blocks=8, peak_used_blocks=5, num_preemptions=2)
    stats = make_stats(statistics, exit_code=1)
    assert stats["exit_code"] == 1
    assert stats["rows"] == {"read": 4, "answered": 2, "failed": 1, "resumed": 0}
    assert stats["finish_reasons"] == {"stop": 1, "length": 1, "error": 1}
    assert stats["errors"] == {"no_prompt": 1}
    assert stats["tokens"]["prompt"] == 30
    assert stats["seconds"] == {"load": 3.0, "run": 2.0}
    assert stats["rates"]["rows_per_s"] == 1.5
    assert stats["rates"]["completion_tokens_per_s"] == 5.0
    assert (stats["cache"]["peak_used"], stats["cache"]["preemptions"]) == (5, 2)


def test_a_run_that_never_began_has_no_rates():
    assert set(make_stats(JobStatistics())["rates"].values()) == {0.0}


def test_every_field_of_a_recipe_is_a_setting_with_its_origin(recipe):
    settings = every_setting(recipe, ())
    assert settings["model.path"]["value"] == "some/model"
    assert settings["generation_config.temperature"]["value"] == 0.5
    assert settings["continuous_batching_config.page_size"]["value"] == 32
    assert settings["output.order"] == {"value": "completion", "origin": "command line"}
    assert settings["prompt.truncation"] == {"value": "error", "origin": "default"}
    assert settings["deterministic"] == {"value": "auto", "origin": "default"}


def test_what_was_decided_wins_over_what_was_asked(recipe):
    decided = [Setting("continuous_batching_config.num_blocks", 77, "as memory allows")]
    settings = every_setting(recipe, decided)
    expected = {"value": 77, "origin": "as memory allows"}
    assert settings["continuous_batching_config.num_blocks"] == expected
    json.dumps(settings)


def test_the_versions_name_what_makes_the_answers():
    versions = package_versions("1.2.3")
    assert versions["cbgen"] == "1.2.3"
    assert {"python", "torch", "transformers"} <= versions.keys()


def ticked(ticks: int, max_points: int) -> list[int]:
    """Return the row counts of the points after so many ticks, a row each."""
    series, statistics = Series(max_points), JobStatistics()
    for tick in range(ticks):
        statistics.rows_answered = tick
        series.tick(statistics)
    return [point["rows"] for point in series.with_last(statistics)]


def test_a_short_run_has_a_point_for_every_tick():
    assert ticked(5, max_points=8) == [0, 1, 2, 3, 4, 4]


def test_a_long_run_has_fewer_points_evenly_apart():
    assert ticked(10, max_points=8) == [0, 2, 4, 6, 8, 9]
    assert ticked(17, max_points=8) == [0, 4, 8, 12, 16, 16]


def test_the_number_of_points_is_bounded_for_a_week():
    points = ticked(7 * 24 * 3600, max_points=2048)
    assert 1024 <= len(points) <= 2049
    steps = {second - first for first, second in pairwise(points[:-1])}
    assert len(steps) == 1
