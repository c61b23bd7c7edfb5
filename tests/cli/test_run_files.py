"""--stats, --metrics and --trace are there however a run ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from cbgen.engine.runner import Runner
from tests.helpers.commands import SECONDS, Command, parse_rows

ROWS = [{"prompt": "one"}, {"nothing": 1}, {"prompt": "three"}]


@pytest.fixture
def facts(tmp_path) -> list[str]:
    """The options for all three files."""
    names = {"--stats": "stats.json", "--metrics": "m.prom", "--trace": "trace.json"}
    return [word for option, name in names.items() for word in (option, str(tmp_path / name))]


def read_json(path: Path):
    return json.loads(path.read_bytes())


def wait_for_rows(path: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not (path.exists() and path.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.05)


def test_a_finished_run_has_all_three(cbgen, recipe, rows_file, facts, tmp_path):
    finished = cbgen("run", recipe, "-i", rows_file(*ROWS), *facts)
    assert finished.code == 1
    stats = read_json(tmp_path / "stats.json")
    assert stats["exit_code"] == 1
    assert stats["rows"] == {"read": 3, "answered": 2, "failed": 1, "resumed": 0}
    assert stats["errors"] == {"no_prompt": 1}
    assert stats["tokens"]["completion"] == sum(
        row["usage"]["completion_tokens"] for row in finished.rows if row["error"] is None
    )
    assert stats["cache"]["blocks"] == 64
    assert stats["settings"]["generation_config.max_new_tokens"]["value"] == 6
    assert stats["series"][-1]["rows"] == 3
    events = read_json(tmp_path / "trace.json")
    assert {event["name"] for event in events} >= {"step", "prefill", "decode"}
    assert 'cbgen_rows_read_total{output="-"} 3\n' in (tmp_path / "m.prom").read_text()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"in.jsonl", "stats.json", "m.prom", "trace.json"}


def test_a_run_that_cannot_load_its_model_has_statistics(cbgen, recipe, rows_file, tmp_path):
    stats = tmp_path / "stats.json"
    arguments = ["--set", "model.path=/no/such/model", "--stats", str(stats)]
    assert cbgen("run", recipe, "-i", rows_file(*ROWS), *arguments).code == 2
    assert read_json(stats)["exit_code"] == 2
    assert read_json(stats)["rows"]["read"] == 0


def test_a_failed_engine_has_statistics(cbgen, recipe, rows_file, facts, tmp_path, monkeypatch):
    def fail(self, batch):
        raise MemoryError("no memory")

    monkeypatch.setattr(Runner, "launch", fail)
    assert cbgen("run", recipe, "-i", rows_file(*ROWS), *facts).code == 3
    assert read_json(tmp_path / "stats.json")["exit_code"] == 3
    read_json(tmp_path / "trace.json")


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 4), (signal.SIGKILL, None)],
)
def test_a_stopped_run_has_statistics(recipe, facts, tmp_path, number, code):
    command = Command("run", recipe, "--requeue-signal", "USR1", *facts)
    command.write({"prompt": "one"})
    command.out.wait_for("\n")
    command.send(number)
    assert command.wait() == (-signal.SIGKILL if code is None else code)
    stats = read_json(tmp_path / "stats.json")
    assert stats["exit_code"] == code
    assert stats["settings"]["model.path"]["value"]
    trace = (tmp_path / "trace.json").read_text()
    json.loads(trace if code is not None else trace + "]")


def test_a_file_of_the_run_is_not_taken_for_facts(cbgen, recipe, rows_file, tmp_path):
    source, target = rows_file(*ROWS), str(tmp_path / "out.jsonl")
    for path in (source, target, f"{target}.journal"):
        finished = cbgen("run", recipe, "-i", source, "-o", target, "--stats", path)
        assert finished.code == 2
        assert "name another" in finished.err
    both = ["--stats", str(tmp_path / "a"), "--trace", str(tmp_path / "a")]
    assert "already the file of --stats" in cbgen("run", recipe, "-i", source, *both).err
    assert len(Path(source).read_bytes().splitlines()) == 3


def test_nothing_that_the_run_reads_is_written_over(cbgen, recipe, checkpoint, rows_file, tmp_path):
    source = rows_file(*ROWS)
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    (tmp_path / "link.jsonl").symlink_to(recipe)
    out = str(tmp_path / "c.jsonl")
    kept = [Path(recipe), Path(checkpoint, "config.json"), Path(source), template]
    before = [file.read_bytes() for file in kept]
    for options, used in [
        (["-o", out, "--stats", f"{out}.run"], "what is noted of the run"),
        (["-o", out, "--metrics", f"{out}.journal"], "the output's journal"),
        (["-o", out, "--trace", recipe], "the recipe"),
        (["-o", out, "--stats", f"{checkpoint}/config.json"], "a file of the model"),
        (["-o", out, "--stats", str(template)], "the chat template"),
        (["-o", recipe, "--overwrite"], "the recipe"),
        (["-o", str(tmp_path / "link.jsonl"), "--overwrite"], "the recipe"),
        (["-o", source, "--overwrite"], "the input file"),
        (["-o", f"{checkpoint}/model.safetensors", "--overwrite"], "a file of the model"),
    ]:
        finished = cbgen(
            "run", recipe, "-i", source, "--set", f"prompt.chat_template={template}", *options
        )
        assert finished.code == 2
        assert f"is already {used}" in finished.err
        assert "name another file" in finished.err
    assert [file.read_bytes() for file in kept] == before
    assert not Path(out).exists()


def test_a_folder_without_a_model_is_not_searched(cbgen, recipe, rows_file, tmp_path, monkeypatch):
    monkeypatch.setattr("os.walk", lambda path: pytest.fail(f"{path} is searched"))
    finished = cbgen("run", recipe, "-i", rows_file(*ROWS), "--set", f"model.path={tmp_path}")
    assert finished.code == 2
    assert f"{tmp_path}" in finished.err


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_two_runs_through_links_to_one_output_do_not_mix(cbgen, recipe, rows_file, tmp_path, link):
    out, other = tmp_path / "out.jsonl", tmp_path / "other.jsonl"
    first = Command("run", recipe, "-o", str(out), "--quiet")
    first.write({"prompt": "one"})
    wait_for_rows(out)
    getattr(other, link)(out)
    second = cbgen("run", recipe, "-i", rows_file(*ROWS), "-o", str(other), "--overwrite")
    assert second.code == 2
    assert "another run is writing it" in second.err
    first.write({"prompt": "two"})
    first.end_input()
    assert first.wait() == 0
    assert len(parse_rows(out.read_text())) == 2


@pytest.mark.parametrize("change", ["unlink", "truncate"])
def test_an_output_that_is_taken_away_ends_the_run(recipe, tmp_path, change):
    out = tmp_path / "out.jsonl"
    command = Command("run", recipe, "-o", str(out), "--quiet")
    command.write({"prompt": "one"})
    wait_for_rows(out)
    if change == "unlink":
        out.unlink()
    else:
        os.truncate(out, 0)
    with contextlib.suppress(BrokenPipeError):
        command.write({"prompt": "two"})
        command.end_input()
    assert command.wait() == 3
    assert "something else" in command.err.text
    if change == "truncate":
        assert b"\0" not in out.read_bytes()


def test_facts_that_cannot_be_written_are_refused_before_the_model_loads(
    cbgen, recipe, rows_file, tmp_path
):
    missing = str(tmp_path / "missing" / "stats.json")
    finished = cbgen("run", recipe, "-i", rows_file(*ROWS), "--stats", missing)
    assert finished.code == 2
    assert "No such file or directory" in finished.err
