"""benchmarks/peers with stub peers: turns, medians, what is skipped, what is found wrong."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.peers.__main__ import main
from benchmarks.peers.adapters.job import cpu_times
from benchmarks.peers.compare import Sitting, compare, installed
from benchmarks.peers.config import ADAPTERS, Comparison, Peer, read_comparison
from benchmarks.peers.measure import Circumstances, run_peer
from benchmarks.peers.table import table
from cbgen.bench.workloads import BenchRequest, Workload
from cbgen.errors import UsageError
from tests.helpers.sources import ROOT

STUB = """
import time
from job import perform

def generate(options, requests):
    if options["log"]:
        with open(options["log"], "a") as file:
            print(*[len(request.prompt) for request in requests], file=file)
    time.sleep(options["sleep_s"])
    return [
        [options["token"]] * (request.max_new_tokens + options["extra"]) for request in requests
    ]

perform(
    {"token": 7, "extra": 0, "sleep_s": 0, "log": None}, lambda job: job.options, generate
)
"""
WORKLOAD = Workload("mine", (BenchRequest((1, 2, 3), 4), BenchRequest((4, 5), 2)))
WARM_UP_CALL = "24 24 24 24"


@pytest.fixture
def stub(tmp_path):
    """Make a peer that answers with one token over and over."""
    adapter = tmp_path / "stub.py"
    adapter.write_text(STUB)
    model = tmp_path / "model"
    model.mkdir()

    def make(name: str = "stub", **changes) -> Peer:
        options = changes.pop("options", {})
        given = {"adapter": adapter, "model": model, "python": Path(sys.executable)}
        return Peer(name, **{**given, **changes}, options=options)

    return make


@pytest.fixture
def where(tmp_path):
    return Circumstances(threads=1, timeout_s=30, logs=tmp_path)


@pytest.fixture
def sitting(tmp_path, where):
    return Sitting(
        rounds=2,
        where=where,
        references=tmp_path / "references",
        turn=contextlib.nullcontext,
        tell=lambda line: None,
    )


@pytest.fixture
def comparison_file(tmp_path):
    """Write a configuration with two stubs and one peer that is not installed."""
    (tmp_path / "stub.py").write_text(STUB)
    stub = {"adapter": "./stub.py", "model": "."}

    def write(**peers: object) -> Path:
        missing = {**stub, "python": "nowhere/python"}
        content = {"vocab_size": 50, "peers": {"a": stub, "gone": missing, "b": stub, **peers}}
        path = tmp_path / "comparison.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    return write


@pytest.fixture
def workload_file(tmp_path):
    path = tmp_path / "mine.json"
    requests = [
        {"prompt": item.prompt, "max_new": item.max_new_tokens} for item in WORKLOAD.requests
    ]
    path.write_text(json.dumps({"name": "mine", "requests": requests}))
    return str(path)


def finished_run(peer: str, seconds: float, **fields: object) -> dict[str, object]:
    return {
        "peer": peer,
        "workload": "W1",
        "seconds": seconds,
        "load_seconds": 1.0,
        "output_tokens_per_s": 100 / seconds,
        "peak_anonymous_mb": 10.0,
        "peak_resident_mb": 20.0,
        "other_cpu_seconds": 0.0,
        "stolen_cpu_seconds": 0.0,
        **fields,
    }


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_peers_take_turns_within_a_workload(stub, sitting):
    peers = (stub("a"), stub("b", workloads=("mine",)))
    other = Workload("other", WORKLOAD.requests)
    runs = compare(Comparison(50, peers), (WORKLOAD, other), sitting)
    assert [(run["workload"], run["peer"], run["round"]) for run in runs] == [
        ("mine", "a", 1),
        ("mine", "b", 1),
        ("mine", "a", 2),
        ("mine", "b", 2),
        ("other", "a", 1),
        ("other", "a", 2),
    ]


def test_a_run_counts_the_tokens_and_the_seconds_of_generation_alone(stub, where):
    run, outputs = run_peer(stub(options={"sleep_s": 0.3}), WORKLOAD, where)
    assert outputs == [[7] * 4, [7] * 2]
    assert (run["prompt_tokens"], run["output_tokens"]) == (5, 6)
    assert 0.3 <= run["seconds"] <= run["process_seconds"] - 0.3  # the warm-up takes as long
    assert run["peak_anonymous_mb"] > 1


def test_the_first_request_can_fill_the_cache_within_the_timed_span(stub, where, tmp_path):
    log = tmp_path / "calls"
    peer = stub(fill_cache_first=True, options={"log": str(log), "sleep_s": 0.1})
    run, _ = run_peer(peer, WORKLOAD, where)
    assert log.read_text().splitlines() == [WARM_UP_CALL, "3", "3 2"]
    assert run["seconds"] >= 0.2


def test_outputs_of_a_wrong_length_fail_the_run(stub, where):
    run, outputs = run_peer(stub(options={"extra": 1}), WORKLOAD, where)
    assert (run["error"], outputs) == ("request 0 has 5 tokens, not 4", [])
    assert "seconds" not in run


def test_an_option_that_the_adapter_does_not_know_fails_the_run_and_is_named(stub, where):
    run, _ = run_peer(stub(options={"tokem": 8}), WORKLOAD, where)
    assert "exit code 1" in run["error"]
    assert "unknown options ['tokem']" in run["error"]


def test_a_run_that_takes_too_long_is_ended(stub, tmp_path):
    where = Circumstances(threads=1, timeout_s=0.3, logs=tmp_path)
    run, _ = run_peer(stub(options={"sleep_s": 600}), WORKLOAD, where)
    assert "not done after" in run["error"]


def test_sequences_are_compared_with_a_reference_that_is_generated_once(stub, sitting, tmp_path):
    log = tmp_path / "calls"
    reference = stub("reference", options={"log": str(log)})
    comparison = Comparison(50, (stub("same"), stub("other", options={"token": 8})), reference)
    for _ in range(2):
        shares = {
            run["peer"]: run["equal_sequences"] for run in compare(comparison, [WORKLOAD], sitting)
        }
        assert shares == {"same": 1.0, "other": 0.0}
    assert log.read_text().splitlines() == [WARM_UP_CALL, "3 2"]


def test_a_reference_that_fails_compares_nothing_and_is_told(stub, sitting, tmp_path):
    reference = stub("reference", options={"extra": 1})
    runs = list(compare(Comparison(50, (stub(),), reference), [WORKLOAD], sitting))
    assert [run.get("equal_sequences") for run in runs] == [None, None]
    assert not (tmp_path / "references").exists()


def test_a_peer_that_is_not_installed_is_skipped_with_a_line(stub, tmp_path):
    told: list[str] = []
    peers = (stub("here"), stub("gone", python=tmp_path / "nowhere"))
    left = installed(Comparison(50, peers), (), told.append).peers
    assert [peer.name for peer in left] == ["here"]
    assert told == [f"gone: skipped, there is no {tmp_path / 'nowhere'}"]


def test_a_peer_that_nobody_knows_is_refused(stub):
    with pytest.raises(UsageError, match="no peer is called 'bb'; there are b"):
        installed(Comparison(50, (stub("b"),)), ("bb",), print)


def test_the_table_has_medians_and_ratios_to_the_first_peer():
    seconds = {"a": (4.0, 8.0, 5.0), "b": (2.0, 3.0, 2.5)}
    runs = [finished_run(peer, value[turn]) for turn in range(3) for peer, value in seconds.items()]
    assert [row[:5] for row in rows_of(table(runs, 2))] == [
        ["W1", "a", "5.00 (4.00, 8.00, 5.00)", "1.00", "20"],
        ["W1", "b", "2.50 (2.00, 3.00, 2.50)", "0.50", "40"],
    ]


def test_the_table_shows_the_lowest_share_of_same_sequences_and_the_highest_peak():
    runs = [
        finished_run("a", 1.0, equal_sequences=share, peak_anonymous_mb=peak)
        for share, peak in ((1.0, 1200.0), (0.5, 900.0))
    ]
    (row,) = rows_of(table(runs, 2))
    assert row[6:8] == ["1,200 / 20", "50%"]


def test_the_table_marks_runs_that_others_disturbed():
    quiet = finished_run("a", 10.0, other_cpu_seconds=0.5)
    loud = finished_run("a", 10.0, other_cpu_seconds=0.4, stolen_cpu_seconds=0.3)
    text = table([quiet, loud], 2)  # 3 % of two cores for ten seconds are 0.6 s
    assert rows_of(text)[0][2] == r"10.00 (10.00, 10.00\*)"
    assert r"\* disturbed" in text
    assert "disturbed" not in table([quiet], 2)


def test_a_peer_whose_runs_all_failed_has_a_line_that_says_so():
    failed = {"peer": "a", "workload": "W1", "error": "broken"}
    rows = rows_of(table([failed, finished_run("b", 2.0)], 2))
    assert [row[:4] for row in rows] == [["W1", "a", "failed", ""], ["W1", "b", "2.00", ""]]


def test_the_command_prints_a_line_for_each_run_and_a_table(
    comparison_file, workload_file, tmp_path, capsys
):
    arguments = [str(comparison_file()), "--workloads", workload_file, "--rounds", "1"]
    places = ["--cache", str(tmp_path / "cache"), "--lock", str(tmp_path / "lock")]
    assert main([*arguments, *places]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["peer"] for line in out.splitlines()] == ["a", "b"]
    assert [row[1] for row in rows_of(err)] == ["a", "b"]
    assert "gone: skipped" in err


def test_the_command_fails_if_a_run_did_and_keeps_the_others(
    comparison_file, workload_file, tmp_path, capsys
):
    bad = {"adapter": "./stub.py", "model": ".", "options": {"extra": 2}}
    arguments = [str(comparison_file(bad=bad)), "--workloads", workload_file, "--rounds", "1"]
    assert main([*arguments, "--peers", "bad", "b", "--cache", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert "FAILED: request 0 has 6 tokens, not 4" in err
    assert rows_of(err)[0][1:3] == ["bad", "failed"]


def test_earlier_runs_join_the_table(comparison_file, workload_file, tmp_path, capsys):
    earlier = tmp_path / "earlier.jsonl"
    earlier.write_text(json.dumps(finished_run("old", 3.0)) + "\n")
    arguments = [str(comparison_file()), "--workloads", workload_file, "--peers", "a"]
    assert main([*arguments, "--earlier", str(earlier), "--cache", str(tmp_path)]) == 0
    assert [row[:2] for row in rows_of(capsys.readouterr().err)] == [["W1", "old"], ["mine", "a"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pyhton": "x"}, r"a: unknown keys \['pyhton'\]"),
        ({"model": None, "adapter": "$NO_SUCH_VARIABLE/x"}, "set this environment variable"),
        ({"options": ["x"]}, "a: options: expected keys with values"),
    ],
)
def test_a_wrong_configuration_is_refused_at_its_place(comparison_file, change, message):
    path = comparison_file(a={"adapter": "./stub.py", "model": ".", **change})
    with pytest.raises(UsageError, match=message):
        read_comparison(path)


@pytest.mark.parametrize("name", ["smollm2.yaml", "qwen3-shape.yaml"])
def test_the_configurations_of_the_repository_name_adapters_that_exist(name, monkeypatch, tmp_path):
    monkeypatch.setenv("PEERS_HOME", str(tmp_path))
    comparison = read_comparison(ROOT / "benchmarks" / "peers" / name)
    assert comparison.reference is not None
    peers = (*comparison.peers, comparison.reference)
    assert {peer.adapter.parent for peer in peers} == {ADAPTERS}
    assert [peer.adapter for peer in peers if not peer.adapter.is_file()] == []


def test_cpu_time_of_this_process_is_its_own():
    before = cpu_times()
    while cpu_times().own < before.own + 0.1:
        sum(range(10_000))
    after = cpu_times()
    assert after.everybody - before.everybody >= 0.05
