"""`cbgen bench`: a table for people, one JSON line for programs, token ids in a file."""

from __future__ import annotations

import json

import pytest

from cbgen.bench import measurement
from cbgen.bench.roofline import MachineRates
from cbgen.cli.bench import table_lines

REQUESTS = [{"prompt": [5, 6, 7], "max_new": 4}, {"prompt": [9], "max_new": 2}]
FIELDS = {
    "workload",
    "seconds",
    "load_seconds",
    "output_tokens",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "roofline_seconds",
    "peak_memory_mb",
    "parts",
    "forward",
}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine that need not be measured."""
    monkeypatch.setattr(
        measurement, "measure_machine", lambda device, dtype: MachineRates(1e9, 1e9)
    )


@pytest.fixture
def workload(tmp_path) -> str:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "mine", "requests": REQUESTS}))
    return str(path)


def test_stdout_has_one_json_line_and_stderr_the_table(cbgen, recipe, workload):
    finished = cbgen("bench", recipe, "--workload", workload)
    assert finished.code == 0
    (summary,) = finished.rows
    assert summary.keys() >= FIELDS
    assert (summary["workload"], summary["output_tokens"]) == ("mine", 6)
    assert summary["roofline_seconds"] > 0
    assert summary["peak_memory_mb"] > 10
    for part in ("schedule", "execute", "roofline", "output tokens/s", "peak memory"):
        assert part in finished.err


def test_a_built_in_workload_runs_by_its_name(cbgen, recipe):
    finished = cbgen("bench", recipe, "--workload", "W3h", "--quiet")
    assert (finished.code, finished.err) == (0, "")
    (summary,) = finished.rows
    assert (summary["workload"], summary["output_tokens"]) == ("W3h", 32 * 96)


def test_outputs_has_a_list_for_each_request_in_order(cbgen, recipe, workload, tmp_path):
    path = tmp_path / "outputs.json"
    assert cbgen("bench", recipe, "--workload", workload, "--outputs", str(path)).code == 0
    assert [len(tokens) for tokens in json.loads(path.read_text())] == [4, 2]


def test_set_reaches_the_engine(cbgen, recipe, workload):
    finished = cbgen(
        "bench", recipe, "--workload", workload, "--set", "model.attn_implementation=eager"
    )
    assert finished.rows[0]["machine"]["attn_implementation"] == "eager"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "W9"], "W1, W1h"),
        (["--workload", "W4h"], "2064 tokens"),
        (["--outputs", "no/such/folder/file"], "--outputs no/such/folder/file: cannot be written"),
        (["--set", "model.dtpye=auto"], "did you mean dtype"),
    ],
)
def test_what_cannot_run_is_refused(cbgen, recipe, arguments, message):
    finished = cbgen("bench", recipe, *arguments)
    assert (finished.code, finished.out) == (2, "")
    assert message in finished.err


def test_a_model_without_a_bound_is_shown_without_one(cbgen, recipe, workload):
    (summary,) = cbgen("bench", recipe, "--workload", workload).rows
    (line,) = [line for line in table_lines(summary | {"roofline_seconds": None}) if "roof" in line]
    assert "not computed" in line
