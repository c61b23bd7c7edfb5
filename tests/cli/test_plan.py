"""`cbgen plan`: a table for people, one JSON line for programs, an exit code for both."""

from __future__ import annotations

import json

import pytest

from cbgen.engine.model import loader as load
from tests.helpers.batch_files import chat_line
from tests.helpers.commands import Command


def only_object(text: str) -> dict:
    (line,) = text.splitlines()
    return json.loads(line)


def test_good_rows_end_with_0_and_one_json_line(cbgen, recipe, rows_file):
    finished = cbgen("plan", recipe, "-i", rows_file({"prompt": "one"}, {"prompt": "three"}))
    assert finished.code == 0
    plan = only_object(finished.out)
    assert plan["rows"] == 2
    assert plan["prompt_tokens"]["max"] == 5
    cache = plan["cache"]
    assert (cache["blocks"], cache["page_size"], cache["tokens"]) == (64, 16, 1024)
    assert plan["groups"][0]["attention"] == "full"
    assert plan["estimate"]["steps"] > 0
    for part in ("rows", "prompt tokens", "memory", "weights", "full attention", "cache blocks"):
        assert part in finished.err
    for part in ("prefix sharing", "host pool", "steps, about"):
        assert part in finished.err


def test_bad_rows_end_with_1_and_are_shown_with_place_and_reason(cbgen, recipe, rows_file):
    source = rows_file({"prompt": "one"}, b"not JSON", {"id": "a", "nothing": 1})
    finished = cbgen("plan", recipe, "-i", source)
    assert finished.code == 1
    assert only_object(finished.out)["bad_rows"]["codes"] == {"invalid_json": 1, "no_prompt": 1}
    (line,) = [line for line in finished.err.splitlines() if f"{source}:2" in line]
    assert "JSON" in line


def test_no_weights_are_loaded(cbgen, recipe, rows_file, monkeypatch):
    def fail(*arguments):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(load, "_load_weights", fail)
    assert cbgen("plan", recipe, "-i", rows_file({"prompt": "one"})).code == 0


def test_without_input_the_engine_is_planned(cbgen, recipe):
    finished = cbgen("plan", recipe)
    assert finished.code == 0
    assert only_object(finished.out)["rows"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-i", "missing.jsonl"], "missing.jsonl"),
        (["--set", "model.path=/no/such/model"], "there is no such folder"),
        (["--set", "continuous_batching_config.num_blocks=100000000"], "lower num_blocks"),
        (["--set", "model.dtpye=auto"], "did you mean dtype"),
    ],
)
def test_what_a_run_would_be_refused_for_is_refused(cbgen, recipe, arguments, message):
    finished = cbgen("plan", recipe, *arguments)
    assert (finished.code, finished.out) == (2, "")
    assert message in finished.err


def test_quiet_leaves_the_json_line_alone(cbgen, recipe, rows_file):
    finished = cbgen("plan", recipe, "-i", rows_file({"prompt": "one"}), "--quiet")
    assert finished.err == ""
    assert only_object(finished.out)["rows"] == 1


def test_the_plan_is_what_the_run_does(cbgen, recipe, rows_file, tmp_path):
    row = {"prompt": "abc", "generation_config": {"ignore_eos": True}}
    source = rows_file(*[row] * 40)
    plan = only_object(cbgen("plan", recipe, "-i", source).out)
    stats_path = tmp_path / "stats.json"
    assert cbgen("run", recipe, "-i", source, "--stats", str(stats_path)).code == 0
    stats = json.loads(stats_path.read_bytes())
    assert stats["tokens"]["prompt"] == plan["estimate"]["prompt_tokens"]
    assert stats["tokens"]["completion"] == plan["estimate"]["completion_tokens"]
    assert stats["cache"]["blocks"] == plan["cache"]["blocks"]
    assert 0.5 < stats["series"][-1]["steps"] / plan["estimate"]["steps"] < 2


def test_a_terminal_shows_a_table_and_stdout_gets_the_line(recipe, rows_file):
    command = Command("plan", recipe, "-i", rows_file({"prompt": "one"}), err="terminal")
    assert command.wait() == 0
    assert "\x1b[1;36m" in command.err.text
    assert only_object(command.out.text)["rows"] == 1


def test_rows_come_from_a_pipe_too(recipe):
    command = Command("plan", recipe, "-i", "-")
    command.write({"prompt": "one"})
    command.end_input()
    assert command.wait() == 0
    assert only_object(command.out.text)["rows"] == 1


def test_a_streamed_batch_line_is_told_with_its_line(cbgen, recipe, rows_file):
    source = rows_file(chat_line("a"), chat_line("b", stream=True))
    finished = cbgen("plan", recipe, "-i", source)
    assert finished.code == 1
    (bad,) = only_object(finished.out)["bad_rows"]["first"]
    assert bad["place"] == f"{source}:2"
    assert "stream" in bad["message"]
