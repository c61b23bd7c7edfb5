from __future__ import annotations

import json
import logging

import pytest

from cbgen.errors import OutputError, UsageError
from cbgen.io.output.atomic_file import AtomicFile
from cbgen.job.report import report_writer
from cbgen.job.report.report_writer import ReportWriter
from cbgen.job.report.statistics import JobStatistics
from cbgen.recipe.load import recipe_from_mapping


@pytest.fixture
def watch(tmp_path):
    """Make a writer that writes stats.json and m.prom."""

    def make(statistics: JobStatistics | None = None, **paths) -> ReportWriter:
        paths = {"stats_path": "stats.json", "metrics_path": "m.prom"} | paths
        return ReportWriter(
            statistics or JobStatistics(),
            recipe_from_mapping({"model": {"path": "some/model"}}),
            output="out.jsonl",
            version="1.2.3",
            **{name: str(tmp_path / path) for name, path in paths.items()},
        )

    return make


def read_stats(tmp_path) -> dict:
    return json.loads((tmp_path / "stats.json").read_bytes())


def test_the_files_are_there_while_the_run_goes_on(watch, tmp_path, monkeypatch):
    monkeypatch.setattr(report_writer, "_TICK_SECONDS", 0.001)
    monkeypatch.setattr(report_writer, "_STATS_SECONDS", 0.002)
    statistics = JobStatistics(run_started=0.0)
    writer = watch(statistics)
    writer.start()
    while not writer._series.with_last(statistics)[5:]:
        pass
    while not (tmp_path / "stats.json").stat().st_size:
        pass
    assert read_stats(tmp_path)["exit_code"] is None
    writer.finish(0)
    assert read_stats(tmp_path)["exit_code"] == 0
    assert len(read_stats(tmp_path)["series"]) > 5
    assert "cbgen_exit_code" in (tmp_path / "m.prom").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.prom", "stats.json"]


def test_a_run_that_never_began_has_statistics_too(watch, tmp_path):
    watch().finish(2)
    stats = read_stats(tmp_path)
    assert stats["exit_code"] == 2
    assert stats["settings"]["model.path"]["value"] == "some/model"


def test_a_file_that_cannot_be_written_is_refused_at_the_start(watch):
    with pytest.raises(UsageError, match=r"--stats .*cannot be written"):
        watch(stats_path="missing/stats.json")
    with pytest.raises(UsageError, match=r"--metrics .*is no regular file"):
        watch(metrics_path=".")


def test_a_disk_that_fails_later_is_said_once(watch, monkeypatch, caplog):
    def fail(self, content):
        raise OutputError("stats.json: cannot be written: No space left on device")

    writer = watch()
    monkeypatch.setattr(AtomicFile, "replace", fail)
    with caplog.at_level(logging.WARNING, logger="cbgen"):
        for _ in range(3):
            writer.finish(0)
    assert len(caplog.records) == 2  # one for each file
    assert "the run goes on" in caplog.text
