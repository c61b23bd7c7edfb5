"""What an observer of the engine is told, and in which order."""

from __future__ import annotations

from cbgen.engine.core import Engine
from cbgen.engine.events import StepTimes
from tests.helpers.engine import make_request, make_scheduler, run_engine
from tests.helpers.shadow import ShadowRunner


class Recorder:
    """Keeps everything that it is told."""

    def __init__(self) -> None:
        self.events: list[tuple] = []
        self.steps: list[StepTimes] = []

    def admitted(self, row, request_id, num_tokens):
        self.events.append(("admitted", row, request_id, num_tokens))

    def decoding(self, row):
        self.events.append(("decoding", row))

    def preempted(self, row, num_computed_tokens):
        self.events.append(("preempted", row, num_computed_tokens))

    def ended(self, row, reason, num_generated_tokens):
        self.events.append(("ended", row, reason, num_generated_tokens))

    def stepped(self, times):
        self.events.append(("stepped", times.step))
        self.steps.append(times)


def observe(requests, **options) -> Recorder:
    recorder = Recorder()
    scheduler = make_scheduler(observer=recorder, **options)
    run_engine(Engine(scheduler, ShadowRunner(page_size=4), observer=recorder), requests)
    return recorder


def test_a_request_is_followed_from_its_row_to_its_end():
    recorder = observe([make_request("a", [3, 4, 5], max_new_tokens=2)])
    assert recorder.events == [
        ("admitted", 0, "a", 3),
        ("decoding", 0),
        ("stepped", 1),
        ("ended", 0, "length", 2),
        ("stepped", 2),
    ]


def test_a_prompt_in_chunks_decodes_after_its_last_chunk():
    recorder = observe([make_request("a", 10, max_new_tokens=1)], max_batch_tokens=8)
    assert [event[0] for event in recorder.events] == [
        "admitted", "stepped", "decoding", "ended", "stepped",
    ]  # fmt: skip


def test_a_request_that_never_had_a_row_is_not_told():
    assert observe([make_request("a", [])]).events == []


def test_a_preempted_request_loses_its_row_and_gets_one_again():
    requests = [make_request(name, 7, max_new_tokens=8) for name in "ab"]
    recorder = observe(requests, num_blocks=5)
    kinds = [event[0] for event in recorder.events if event[0] != "stepped"]
    assert kinds.count("preempted") == 1
    assert kinds.count("admitted") == kinds.count("decoding") == 3
    assert kinds.count("ended") == 2
    (lost,) = [event[2] for event in recorder.events if event[0] == "preempted"]
    assert lost > 0


def test_a_request_is_admitted_with_the_tokens_that_are_left_to_compute():
    requests = [make_request("a", 9, max_new_tokens=1), make_request("b", 9, max_new_tokens=1)]
    recorder = observe(requests, shares_prefixes=True)
    assert [event[2:] for event in recorder.events if event[0] == "admitted"] == [
        ("a", 9),
        ("b", 1),
    ]


def test_a_step_tells_its_times_and_sizes():
    recorder = observe([make_request("a", 5, max_new_tokens=2), make_request("b", 3)])
    first = recorder.steps[0]
    assert first.started <= first.scheduled <= first.executed <= first.updated
    assert (first.num_tokens, first.num_requests, first.num_waiting) == (8, 2, 0)
    assert first.num_used_blocks == 3
    assert [times.step for times in recorder.steps] == list(range(1, len(recorder.steps) + 1))
