"""Runs one behind the other: a second one alike, and several under a time limit."""

from __future__ import annotations

import time

from tests.helpers.commands import Command

ROWS = [{"id": f"q{number}", "prompt": "word " * (number % 5 + 1)} for number in range(9)]


def test_a_second_run_behind_the_first_gives_the_same_rows(recipe, rows_file):
    source = rows_file(*ROWS)
    outputs = []
    for _ in range(2):
        command = Command("run", recipe, "-i", source, "--quiet")
        assert command.wait() == 0
        outputs.append(command.out.text)
    assert outputs[0] == outputs[1]


def take_time() -> None:
    """Let every step of the engine take its time."""
    from cbgen.engine.runner import Runner

    launch = Runner.launch

    def launch_slowly(self, batch):
        time.sleep(0.05)
        return launch(self, batch)

    Runner.launch = launch_slowly


def test_runs_under_a_time_limit_come_to_the_rows_of_one_run(cbgen, recipe, rows_file, tmp_path):
    long = {"max_new_tokens": 99, "ignore_eos": True}
    rows = [{"prompt": "one"}, *({"prompt": "x", "generation_config": long},) * 2]
    source, target = rows_file(*rows), tmp_path / "out.jsonl"
    arguments = ("run", recipe, "-i", source, "-o", str(target), "--resume")
    limited = Command(*arguments, "--time-limit", "4s", prepare=take_time)
    assert limited.wait() == 4
    # On a busy machine the limit may pass before the first row is there.
    kept = target.read_bytes().splitlines() if target.exists() else []
    assert len(kept) < len(rows)
    finished = cbgen(*arguments)
    assert finished.code == 0
    assert ("by an earlier run" in finished.err) == bool(kept)
    assert target.read_text() == cbgen("run", recipe, "-i", source).out
