"""Rates, rows left, time left, and the plain lines and blocks made of them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cbgen.cli import progress
from cbgen.cli.progress import Progress, ProgressMeter, live_view, log_line
from cbgen.engine.events import StepStats
from cbgen.io.inputs import Inputs
from cbgen.job.report.statistics import JobStatistics


def make_progress(**changes) -> Progress:
    fields = {
        "phase": "running",
        "elapsed": 75.0,
        "rows_done": 1234,
        "rows_failed": 2,
        "rows_left": 3766,
        "seconds_left": 3725.0,
        "tokens_in": 1500.4,
        "tokens_out": 3.21,
        "engine": StepStats(
            num_running=48, num_waiting=16, num_blocks=200, num_used_blocks=74, num_preemptions=3
        ),
    }
    return Progress(**{**fields, **changes})


@pytest.fixture
def clock(monkeypatch):
    """A monotonic clock in a list of one number."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def statistics() -> JobStatistics:
    return JobStatistics(phase="running", run_started=100.0)


def test_a_log_line_holds_everything_in_one_line():
    assert log_line(make_progress()) == (
        "1:15 | 1,234 rows done, 3,766 left, 2 failed | 1,500 tokens/s in, 3.2 out | "
        "48 running, 16 waiting | cache 37% | 3 preemptions | about 1:02:05 left"
    )


def test_a_log_line_leaves_out_what_is_not_known_or_did_not_happen():
    line = log_line(
        make_progress(
            rows_done=1,
            rows_failed=0,
            rows_left=None,
            seconds_left=None,
            engine=StepStats(num_blocks=1),
        )
    )
    assert (
        line == "1:15 | 1 row done | 1,500 tokens/s in, 3.2 out | 0 running, 0 waiting | cache 0%"
    )


def test_before_the_model_is_loaded_a_log_line_says_the_phase():
    line = log_line(make_progress(phase="loading model", engine=StepStats()))
    assert line == "1:15 | loading model"


@pytest.mark.parametrize("width", [40, 80])
def test_the_live_view_has_three_lines_that_fit(width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(live_view(make_progress()))
    lines = capture.get().splitlines()
    assert len(lines) == 3
    assert all(len(line) <= width for line in lines)


def test_the_live_view_shows_the_phase_while_the_model_loads():
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(live_view(make_progress(phase="loading model", engine=StepStats())))
    assert "loading model" in capture.get()


def test_rates_are_those_since_the_run_began_at_first(clock, statistics):
    meter = ProgressMeter(statistics)
    clock[0] = 102.0
    # 50 prompt tokens and 9 of 10 generated ones were run
    statistics.engine = StepStats(num_computed_tokens=59, num_generated_tokens=10)
    look = meter.read()
    assert look.tokens_out == 5.0
    assert look.tokens_in == pytest.approx(25, abs=1)


def test_rates_forget_what_is_long_past(clock, statistics):
    meter = ProgressMeter(statistics)
    statistics.engine = StepStats(num_computed_tokens=10_000, num_generated_tokens=1000)
    for clock[0] in range(101, 130):
        look = meter.read()
    assert (look.tokens_in, look.tokens_out) == (0.0, 0.0)


def test_recomputed_tokens_are_no_input(clock, statistics):
    meter = ProgressMeter(statistics)
    clock[0] = 101.0
    statistics.engine = StepStats(num_computed_tokens=500, num_recomputed_tokens=500)
    assert meter.read().tokens_in == 0.0


def test_rows_left_are_unknown_while_a_pipe_is_open(statistics):
    statistics.rows_read = 10
    look = ProgressMeter(statistics).read()
    assert (look.rows_left, look.seconds_left, look.share_done) == (None, None, None)


def test_rows_left_are_exact_when_the_input_has_ended(clock, statistics):
    statistics.rows_read, statistics.input_ended, statistics.rows_answered = 10, True, 4
    clock[0] = 108.0
    look = ProgressMeter(statistics, limit=50).read()
    assert (look.rows_left, look.seconds_left, look.share_done) == (6, 12.0, 0.4)


@pytest.mark.parametrize(
    ("content", "limit", "left"),
    [(b"a\nb\nc\n", None, 3), (b"a\nb\nc", None, 3), (b"", None, 0), (b"a\nb\nc\n", 2, 2)],
)
def test_rows_of_a_file_are_counted_ahead(tmp_path, statistics, content, limit, left):
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    meter = ProgressMeter(statistics, limit)
    meter.count_rows(Inputs([str(path)])).join()
    assert meter.read().rows_left == left


def test_what_is_no_file_is_not_counted(statistics):
    meter = ProgressMeter(statistics)
    meter.count_rows(Inputs(["-"])).join()
    assert meter.read().rows_left is None


def test_a_log_gets_a_line_at_every_interval(cbgen, recipe, rows_file, monkeypatch):
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.01)
    finished = cbgen("run", recipe, "-i", rows_file({"prompt": "one"}))
    assert " | " in finished.err


def test_a_run_that_is_over_sooner_has_no_progress_line(cbgen, recipe, rows_file):
    finished = cbgen("run", recipe, "-i", rows_file({"prompt": "one"}))
    assert " | " not in finished.err


def test_a_log_has_as_many_lines_for_many_rows_as_for_one(cbgen, recipe, rows_file):
    num_lines = [
        cbgen("run", recipe, "-i", rows_file(*[{"prompt": "one"}] * num_rows)).err.count("\n")
        for num_rows in (1, 60)
    ]
    assert num_lines[0] == num_lines[1]
