"""Processes that get SIGKILL or SIGTERM: before each operation on the disk, or at random."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from tests.helpers.commands import Command
from tests.helpers.small_runs import SUFFIXES, assert_same_output, read_output
from tests.helpers.sources import ROOT

ROWS = 24
LONGEST_LIFE = 0.5
"""Seconds in which a run comes near its end."""
STEP_SECONDS = 0.01


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("again", [(), ("again",)], ids=["run", "resume"])
@pytest.mark.parametrize("order", ["input", pytest.param("completion", marks=pytest.mark.slow)])
def test_a_process_killed_before_any_operation_resumes(tmp_path, suffix, again, order):
    finished = subprocess.run(
        [sys.executable, "-m", "tests.helpers.kill_each", str(tmp_path), suffix, order, *again],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout) > 30


def slow_down_and_die(seconds: float, number: signal.Signals) -> None:
    """Let every step of the engine take its time, and a signal come after some of them."""
    from cbgen.engine.runner import Runner

    launch = Runner.launch
    has_begun = threading.Event()

    def launch_slowly(self, batch):
        if not has_begun.is_set():
            has_begun.set()
            timer = threading.Timer(seconds, os.kill, (os.getpid(), number))
            timer.daemon = True
            timer.start()
        time.sleep(STEP_SECONDS)
        return launch(self, batch)

    Runner.launch = launch_slowly


def resume_until_done(recipe, source, output, number, *, order, deaths, chance):
    """Run and resume, each time until death; return how many runs it took."""
    for num_runs in range(deaths + 1):
        life = chance.uniform(0, LONGEST_LIFE) if num_runs < deaths else 10**6
        command = Command(
            "run", recipe, "-i", str(source), "-o", str(output), "--resume", "--quiet",
            "--order", order, prepare=partial(slow_down_and_die, life, number),
        )  # fmt: skip
        code = command.wait()
        if code == 0:
            return num_runs + 1
        assert code == (-signal.SIGKILL if number is signal.SIGKILL else 128 + number)
    raise AssertionError("the last run was not disturbed")


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("order", ["input", pytest.param("completion", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("number", "deaths"),
    [
        pytest.param(signal.SIGKILL, 2, id="SIGKILL"),
        pytest.param(signal.SIGTERM, 1, id="SIGTERM"),
        pytest.param(signal.SIGKILL, 25, id="SIGKILL-often", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 25, id="SIGTERM-often", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_dies_at_random_moments_ends_with_the_rows_of_an_undisturbed_one(
    slow_recipe, source, undisturbed, tmp_path, suffix, order, number, deaths
):
    chance = random.Random(f"{suffix} {order} {number}")
    left = deaths
    for attempt in itertools.count():
        output = tmp_path / f"out-{attempt}{suffix}"
        runs = resume_until_done(
            slow_recipe, source, output, number, order=order, deaths=left, chance=chance
        )
        left -= runs - 1
        assert sorted(row["id"] for row in read_output(output)) == sorted(
            f"r{index}" for index in range(ROWS)
        )
        assert_same_output(output, undisturbed(suffix), order)
        if left == 0:
            break
