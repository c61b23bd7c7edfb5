"""The trace is Chrome's format, at any moment of a run, and follows the engine."""

from __future__ import annotations

import json
import logging
from itertools import pairwise

import pytest

from cbgen.errors import UsageError
from cbgen.job.report import trace as tracing
from cbgen.job.report.trace import TraceFile
from tests.helpers.engine import make_request, run_engine
from tests.helpers.scripted import ScriptedModel, make_scripted_engine


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json"


def run_traced(path, requests, **plan) -> list[dict]:
    """Run requests and return the events of their trace."""
    trace = TraceFile(str(path))
    run_engine(make_scripted_engine(ScriptedModel(), trace, **plan), requests)
    trace.close()
    return json.loads(path.read_bytes())


def spans(events: list[dict], name: str) -> list[dict]:
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def test_a_request_has_a_prefill_and_a_decode_span_on_the_track_of_its_row(path):
    requests = [
        make_request("a", 3, max_new_tokens=4),
        make_request("b", [9, 9, 9, 9, 9], max_new_tokens=2),
    ]
    events = run_traced(path, requests)
    prefills, decodes = spans(events, "prefill"), spans(events, "decode")
    assert {span["args"]["id"]: span["args"]["tokens"] for span in prefills} == {"a": 3, "b": 5}
    ended = {span["args"]["id"]: span["args"]["generated_tokens"] for span in decodes}
    assert ended == {"a": 4, "b": 2}
    assert {span["args"]["reason"] for span in decodes} == {"length"}
    tracks = {span["args"]["id"]: span["tid"] for span in prefills}
    assert tracks == {span["args"]["id"]: span["tid"] for span in decodes}
    assert len(set(tracks.values())) == 2


def test_every_step_is_a_span_with_its_sizes_and_durations(path):
    events = run_traced(path, [make_request("a", 3, max_new_tokens=4)])
    steps = spans(events, "step")
    assert [step["args"]["tokens"] for step in steps] == [3, 1, 1, 1]
    assert {step["tid"] for step in steps} == {0}
    for step in steps:
        arguments = step["args"]
        parts = [arguments[f"{part}_us"] for part in ("schedule", "execute", "update")]
        assert sum(parts) <= step["dur"] + 3


def test_spans_of_a_track_do_not_overlap(path):
    requests = [make_request(str(i), 3, max_new_tokens=3) for i in range(12)]
    events = run_traced(path, requests, max_requests=3)
    tracks: dict[int, list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"])
            tracks.setdefault(event["tid"], []).append(span)
    assert len(tracks) == 4
    for track in tracks.values():
        track.sort()
        assert all(one[1] <= two[0] for one, two in pairwise(track))


def test_tracks_have_names(path):
    events = run_traced(path, [make_request("a", 3, max_new_tokens=1)])
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["steps", "slot 0"]


def test_a_preemption_is_an_instant(path):
    requests = [make_request(str(n), [n] * 7, max_new_tokens=8) for n in (1, 2)]
    events = run_traced(path, requests, num_blocks=5)
    (instant,) = [event for event in events if event["ph"] == "i"]
    assert instant["name"] == "preempted"
    assert instant["args"]["lost_tokens"] > 0
    assert len(spans(events, "prefill")) == 3


def test_a_killed_run_leaves_a_trace_that_lacks_its_bracket_alone(path, monkeypatch):
    monkeypatch.setattr(tracing, "_FLUSH_SECONDS", 0.0)
    trace = TraceFile(str(path))
    engine = make_scripted_engine(ScriptedModel(), trace)
    engine.add(make_request("a", 3, max_new_tokens=9))
    for _ in range(4):
        engine.step()
    events = json.loads(path.read_bytes() + b"]")
    assert len(spans(events, "step")) == 4
    trace.close()
    (decode,) = spans(json.loads(path.read_bytes()), "decode")
    assert decode["args"]["reason"] == "unfinished"


def test_a_trace_without_a_step_is_valid(path):
    TraceFile(str(path)).close()
    assert all(event["ph"] == "M" for event in json.loads(path.read_bytes()))


def test_a_trace_is_cut_at_its_bound_and_that_is_said(path, caplog):
    trace = TraceFile(str(path), most_bytes=2000)
    with caplog.at_level(logging.WARNING, logger="cbgen"):
        request = make_request("a", 3, max_new_tokens=50)
        run_engine(make_scripted_engine(ScriptedModel(vocab_size=99), trace), [request])
    trace.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert path.stat().st_size <= 2000 + 3
    json.loads(path.read_bytes())


def test_a_disk_that_fails_ends_the_trace_and_not_the_engine(path, caplog):
    trace = TraceFile(str(path))
    trace._file.close()
    trace._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with caplog.at_level(logging.WARNING, logger="cbgen"):
        engine = make_scripted_engine(ScriptedModel(vocab_size=99), trace)
        outputs = run_engine(engine, [make_request("a", 3, max_new_tokens=50)])
        trace.close()
    assert len(outputs["a"].generated_tokens) == 50
    assert "the trace ends here" in caplog.text


def test_a_trace_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--trace"):
        TraceFile(str(tmp_path / "missing" / "trace.json"))
