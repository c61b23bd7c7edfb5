"""What each way to end prints, and its exit code."""

from __future__ import annotations

import json
import shutil
import signal
import warnings
from pathlib import Path

import pytest

from cbgen.engine.runner import Runner
from tests.cli.conftest import MAX_NEW_TOKENS
from tests.helpers.commands import Command, parse_rows

ROWS = [{"prompt": "one"}, {"prompt": "two"}, {"prompt": "three"}]


@pytest.fixture
def source(rows_file) -> str:
    return rows_file(*ROWS)


def only_error(finished) -> str:
    """Return the one `error:` line of a command that failed with usage."""
    assert finished.code == 2
    assert finished.out == ""
    (line,) = [line for line in finished.err.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["init", "{folder}/recipe.yaml", "--force"], 0),
        (["schema"], 0),
        (["merge", "-", "{folder}/shard"], 2),
        (["run", "{folder}/none.yaml"], 2),
        (["plan", "{folder}/none.yaml"], 2),
        (["bench", "{folder}/none.yaml"], 2),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_ends_as_a_process_as_it_does_in_the_tests(cbgen, tmp_path, arguments, code):
    arguments = [argument.format(folder=tmp_path) for argument in arguments]
    command = Command(*arguments)
    assert command.wait() == code
    finished = cbgen(*arguments)
    assert (finished.code, finished.out, finished.err) == (
        code,
        command.out.text,
        command.err.text,
    )


def test_answered_rows_end_with_0_and_a_summary(cbgen, recipe, source, tmp_path):
    target = tmp_path / "out.jsonl"
    finished = cbgen("run", recipe, "-i", source, "-o", str(target))
    assert (finished.code, finished.out) == (0, "")
    assert [row["prompt"] for row in parse_rows(target.read_text())] == ["one", "two", "three"]
    assert "rows       3 read, 3 answered, 0 failed" in finished.err
    assert f"{3 * MAX_NEW_TOKENS} completion" in finished.err
    assert f"output     {target}" in finished.err
    assert not Path(f"{target}.journal").exists()


def test_settings_are_printed_once_with_value_and_origin(cbgen, recipe, source):
    finished = cbgen("run", recipe, "-i", source, "--set", "generation_config.top_p=0.5")
    (line,) = [line for line in finished.err.splitlines() if "max_new_tokens: " in line]
    assert line.split() == ["max_new_tokens:", "6", "#", f"{recipe}:6"]
    assert finished.err.count("page_size") == 1


def test_defaults_of_the_model_are_shown_as_such_and_can_be_left_out(
    cbgen, checkpoint, recipe, source, tmp_path
):
    model = shutil.copytree(checkpoint, tmp_path / "model")
    (model / "generation_config.json").write_text('{"temperature": 0.1, "top_k": 5}')
    arguments = ("run", recipe, "-i", source, "--set", f"model.path={model}")
    shown = cbgen(*arguments).err.splitlines()
    settings = [line.split() for line in shown if line.endswith("# model")]
    assert ["temperature:", "0.1", "#", "model"] in settings
    assert ["top_k:", "5", "#", "model"] in settings
    without = cbgen(*arguments, "--set", "generation_defaults=none")
    assert "temperature" not in without.err
    assert without.out == cbgen("run", recipe, "-i", source).out


def test_an_empty_input_gives_an_empty_output(cbgen, recipe, rows_file, tmp_path):
    target = tmp_path / "out.jsonl"
    assert cbgen("run", recipe, "-i", rows_file(), "-o", str(target)).code == 0
    assert target.read_bytes() == b""


def test_limit_takes_the_first_rows(cbgen, recipe, source):
    finished = cbgen("run", recipe, "-i", source, "--limit", "2")
    assert [row["prompt"] for row in finished.rows] == ["one", "two"]


def test_limit_must_be_positive(cbgen, recipe, source):
    assert "--limit" in only_error(cbgen("run", recipe, "-i", source, "--limit", "0"))


def test_set_wins_over_the_recipe(cbgen, recipe, source):
    finished = cbgen("run", recipe, "-i", source, "--set", "generation_config.max_new_tokens=2")
    assert {row["usage"]["completion_tokens"] for row in finished.rows} == {2}
    assert "max_new_tokens: 2" in finished.err
    assert "# command line" in finished.err


def test_the_order_flag_wins_over_set(cbgen, recipe, source):
    finished = cbgen(
        "run", recipe, "-i", source, "--set", "output.order=input", "--order", "completion"
    )
    assert finished.code == 0
    assert "order: completion" in finished.err


def test_order_completion_leaves_no_journal_and_gives_every_row(cbgen, recipe, source, tmp_path):
    target = tmp_path / "out.jsonl"
    cbgen("run", recipe, "-i", source, "-o", str(target), "--order", "completion")
    assert sorted(row["index"] for row in parse_rows(target.read_text())) == [0, 1, 2]


def test_an_unknown_order_names_the_choices(cbgen, recipe):
    assert "completion" in only_error(cbgen("run", recipe, "--order", "random"))


def test_a_wrong_recipe_is_named_with_file_and_line(cbgen, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("model:\n  path: x\n  dtyp: float32\n")
    error = only_error(cbgen("run", str(path)))
    assert error.startswith(f"error: {path}:3: ")
    assert "dtype" in error


def test_a_missing_recipe_and_a_missing_command_are_usage_errors(cbgen):
    assert "nowhere.yaml" in only_error(cbgen("run", "nowhere.yaml"))
    assert "RECIPE" in only_error(cbgen("run"))
    assert "command" in only_error(cbgen())


def test_a_model_that_is_not_there_is_a_usage_error(cbgen, recipe, source, tmp_path):
    path = f"model.path={tmp_path}/none"
    assert str(tmp_path) in only_error(cbgen("run", recipe, "-i", source, "--set", path))


def test_a_missing_input_leaves_no_output(cbgen, recipe, tmp_path):
    target = tmp_path / "out.jsonl"
    only_error(cbgen("run", recipe, "-i", str(tmp_path / "none"), "-o", str(target)))
    assert not target.exists()


def test_an_existing_output_is_refused_and_kept(cbgen, recipe, source, tmp_path):
    target = tmp_path / "out.jsonl"
    target.write_text("precious")
    assert "--overwrite" in only_error(cbgen("run", recipe, "-i", source, "-o", str(target)))
    assert target.read_text() == "precious"


def test_overwrite_replaces_an_existing_output(cbgen, recipe, source, tmp_path):
    target = tmp_path / "out.jsonl"
    target.write_text("old\n" * 1000)
    assert cbgen("run", recipe, "-i", source, "-o", str(target), "--overwrite").code == 0
    assert len(parse_rows(target.read_text())) == 3


def test_an_output_that_is_the_input_is_refused_even_with_overwrite(cbgen, recipe, source):
    before = Path(source).read_bytes()
    assert "input" in only_error(cbgen("run", recipe, "-i", source, "-o", source, "--overwrite"))
    assert Path(source).read_bytes() == before


def test_strict_stops_at_the_first_bad_row(cbgen, recipe, rows_file, tmp_path):
    target = tmp_path / "out.jsonl"
    finished = cbgen(
        "run", recipe, "-i", rows_file(b"not JSON", *ROWS), "-o", str(target), "--strict"
    )
    assert "in.jsonl:1" in only_error(finished)
    assert not target.exists()


def test_strict_changes_nothing_where_every_row_is_good(cbgen, recipe, source):
    assert len(cbgen("run", recipe, "-i", source, "--strict").rows) == 3


def test_failed_rows_end_with_1(cbgen, recipe, rows_file):
    finished = cbgen("run", recipe, "-i", rows_file(*ROWS, b"not JSON"))
    assert finished.code == 1
    assert "errors     invalid_json 1" in finished.err


def test_quiet_prints_errors_alone(cbgen, recipe, rows_file):
    finished = cbgen("run", recipe, "-i", rows_file(*ROWS, b"not JSON"), "--quiet")
    assert (finished.code, finished.err) == (1, "")
    finished = cbgen("run", recipe, "-i", "none", "--quiet")
    assert finished.err == f"{only_error(finished)}\n"


@pytest.fixture
def failing_engine(monkeypatch):
    def launch(self, batch):
        raise RuntimeError("device\nlost")

    monkeypatch.setattr(Runner, "launch", launch)


@pytest.mark.usefixtures("failing_engine")
def test_an_engine_that_fails_ends_with_3_and_its_cause_in_one_line(cbgen, recipe, source):
    finished = cbgen("run", recipe, "-i", source, "--quiet")
    assert (finished.code, finished.out) == (3, "")
    assert finished.err == "error: the engine failed: RuntimeError: device lost\n"


@pytest.mark.usefixtures("failing_engine")
def test_cbgen_log_debug_adds_the_traceback(cbgen, recipe, source, monkeypatch):
    monkeypatch.setenv("CBGEN_LOG", "debug")
    finished = cbgen("run", recipe, "-i", source)
    assert finished.code == 3
    assert "RuntimeError: device" in finished.err
    assert "Traceback" in finished.err


def test_rows_that_were_finished_before_a_failure_are_named(
    cbgen, recipe, rows_file, tmp_path, monkeypatch
):
    launch = Runner.launch

    def fail_on_long_prompts(self, batch):
        if batch.num_tokens > 100:
            raise RuntimeError("device lost")
        return launch(self, batch)

    monkeypatch.setattr(Runner, "launch", fail_on_long_prompts)
    target = tmp_path / "out.jsonl"
    one_by_one = "continuous_batching_config.max_requests_per_batch=1"
    source = rows_file({"prompt": "brief"}, {"prompt": "long" * 50})  # in the order of prompts
    finished = cbgen("run", recipe, "-i", source, "-o", str(target), "--set", one_by_one)
    assert finished.code == 3
    assert f"1 row is in {target}" in finished.err
    assert len(parse_rows(target.read_text())) == 1


def test_an_output_that_cannot_be_written_ends_with_3(cbgen, recipe, source):
    finished = cbgen("run", recipe, "-i", source, "-o", "/dev/full")
    assert finished.code == 3
    assert "error: /dev/full: cannot be written: No space left on device" in finished.err


def test_an_unexpected_exception_ends_with_3_and_a_traceback(cbgen, recipe, source, monkeypatch):
    monkeypatch.setattr("cbgen.cli.run.run_job", lambda *_, **__: 1 // 0)
    finished = cbgen("run", recipe, "-i", source)
    assert finished.code == 3
    assert "Traceback" in finished.err
    assert "error: unexpected ZeroDivisionError" in finished.err


def test_an_interrupt_without_rows_says_so(cbgen, recipe, source, monkeypatch):
    def interrupt(*_, **__):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("cbgen.cli.run.run_job", interrupt)
    finished = cbgen("run", recipe, "-i", source)
    assert finished.code == 130
    assert finished.err.endswith("interrupted: no row was written\n")


def test_a_pipe_that_breaks_and_is_not_stdout_is_no_quiet_end(cbgen, recipe, source, monkeypatch):
    def break_pipe(*_, **__):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("cbgen.cli.run.run_job", break_pipe)
    finished = cbgen("run", recipe, "-i", source, "--quiet")
    assert finished.code == 3
    assert "Broken pipe" in finished.err


def test_rows_from_the_keyboard_are_asked_for(cbgen, recipe, monkeypatch):
    monkeypatch.setattr("cbgen.cli.run.os.isatty", lambda descriptor: descriptor == 0)
    monkeypatch.setattr("cbgen.cli.run.run_job", lambda *_, **__: True)
    assert "one JSON object a line" in cbgen("run", recipe).err
    assert "one JSON object a line" not in cbgen("run", recipe, "-i", "in.jsonl").err


def test_a_wrong_cbgen_log_is_a_usage_error(cbgen, recipe, monkeypatch):
    monkeypatch.setenv("CBGEN_LOG", "loud")
    assert "'loud'" in only_error(cbgen("run", recipe))


def test_a_warning_of_a_library_is_one_plain_line(cbgen, recipe, source, monkeypatch):
    from cbgen.job import open_job

    load_model = open_job.load_model

    def warn(config):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("old\n  weights \x1b[0m", stacklevel=1)
        return load_model(config)

    monkeypatch.setattr(open_job, "load_model", warn)
    finished = cbgen("run", recipe, "-i", source)
    assert "\nwarning: UserWarning: old weights \\x1b[0m\n" in finished.err
    assert cbgen("run", recipe, "-i", source, "--quiet").err == ""


def test_schema_is_one_json_document(cbgen):
    assert "properties" in json.loads(cbgen("schema").out)
