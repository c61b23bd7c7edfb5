"""The engine's thread: outputs to a sink, stopping, cancelling, and the one failure boundary."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from cbgen.engine.loop import EngineLoop
from cbgen.engine.request import FinishReason, RequestStatus
from cbgen.errors import EngineError
from tests.helpers.engine import make_request
from tests.helpers.managers import PATIENCE, Gate, ListSink, failing_at
from tests.helpers.scripted import ScriptedModel, make_scripted_engine


@pytest.fixture
def sink() -> ListSink:
    return ListSink()


@pytest.fixture
def start(sink) -> Iterator:
    """Return a function that starts a loop over a scripted model; all loops end with the test."""
    loops = []

    def start_loop(model: ScriptedModel | None = None, **plan) -> EngineLoop:
        loop = EngineLoop(make_scripted_engine(model or ScriptedModel(), **plan), sink)
        loop.start()
        loops.append(loop)
        return loop

    yield start_loop
    for loop in loops:
        assert loop.stop(hard_stop=True, timeout=PATIENCE)


def test_finished_requests_reach_the_sink(start, sink):
    start().submit([make_request("a", [3], max_new_tokens=3), make_request("b", [])])
    sink.wait_for(2)
    assert sink.outputs["a"].generated_tokens == [4, 5, 6]
    assert sink.outputs["b"].error_code == "empty_prompt"


def test_requests_may_be_submitted_in_parts(start, sink):
    loop = start()
    for number in range(20):
        loop.submit([make_request(str(number), [number], max_new_tokens=2)])
    sink.wait_for(20)
    assert sink.outputs["7"].generated_tokens == [8, 9]


def test_requests_may_be_submitted_from_many_threads(start, sink):
    loop = start()

    def work(name: int) -> None:
        for number in range(10):
            loop.submit([make_request(f"{name} {number}", [3], max_new_tokens=2)])

    threads = [threading.Thread(target=work, args=(name,)) for name in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.wait_for(50)
    assert all(output.generated_tokens == [4, 5] for output in sink.outputs.values())


def test_a_stop_finishes_everything_that_was_submitted(start, sink):
    loop = start(max_requests=2)
    loop.submit([make_request(str(i), [3], max_new_tokens=6) for i in range(12)])
    assert loop.stop(timeout=PATIENCE)
    assert len(sink.outputs) == 12
    assert all(output.finish_reason is FinishReason.LENGTH for output in sink.outputs.values())


def test_a_hard_stop_cancels_with_the_tokens_so_far(start, sink):
    gate = Gate(step=3)
    loop = start(ScriptedModel(before_step=gate), max_requests=1)
    loop.submit([make_request("runs", [3]), make_request("waits", [3])])
    assert gate.reached.wait(PATIENCE)
    assert not loop.stop(hard_stop=True, timeout=0)
    gate.opened.set()
    assert loop.stop(timeout=PATIENCE)
    assert sink.outputs["runs"].generated_tokens == [4, 5, 6]
    assert sink.outputs["waits"].generated_tokens == []
    assert {output.status for output in sink.outputs.values()} == {RequestStatus.CANCELLED}


def test_a_hard_stop_may_follow_a_stop_that_takes_too_long(start, sink):
    gate = Gate(step=2)
    loop = start(ScriptedModel(before_step=gate), max_context=10**6, num_blocks=10**5)
    loop.submit([make_request("endless", [3])])
    assert gate.reached.wait(PATIENCE)
    assert not loop.stop(timeout=0.01)
    gate.opened.set()
    assert loop.stop(hard_stop=True, timeout=PATIENCE)
    assert sink.outputs["endless"].finish_reason is FinishReason.CANCELLED


def test_stopping_twice_is_allowed(start):
    loop = start()
    assert loop.stop(timeout=PATIENCE)
    assert loop.stop(timeout=PATIENCE)


def test_a_loop_that_was_never_started_can_be_stopped(sink):
    assert EngineLoop(make_scripted_engine(ScriptedModel()), sink).stop()


def test_a_stopped_loop_takes_no_requests(start):
    loop = start()
    loop.stop(timeout=PATIENCE)
    with pytest.raises(EngineError, match="stopped and takes no more requests"):
        loop.submit([make_request("late", [3])])


def test_a_model_that_raises_ends_the_engine_with_its_cause(start, sink):
    cause = MemoryError("no room for 5 GiB")
    loop = start(ScriptedModel(before_step=failing_at(3, cause)))
    loop.submit([make_request("a", [3])])
    error = sink.wait_for_failure()
    assert "no room for 5 GiB" in str(error)
    assert error.__cause__ is cause
    assert sink.outputs == {}


def test_requests_that_ended_before_the_failure_were_delivered(start, sink):
    loop = start(ScriptedModel(before_step=failing_at(3, ValueError("bad"))))
    loop.submit([make_request("short", [3], max_new_tokens=1), make_request("long", [3])])
    sink.wait_for_failure()
    assert list(sink.outputs) == ["short"]


def test_submitting_to_a_dead_engine_raises_the_cause(start, sink):
    loop = start(ScriptedModel(before_step=failing_at(1, ValueError("bad weights"))))
    loop.submit([make_request("a", [3])])
    failure = sink.wait_for_failure()
    with pytest.raises(EngineError, match="bad weights") as caught:
        loop.submit([make_request("b", [3])])
    assert caught.value.__cause__ is failure


def test_an_error_without_text_is_named_by_its_type(start, sink):
    loop = start(ScriptedModel(before_step=failing_at(1, MemoryError())))
    loop.submit([make_request("a", [3])])
    assert str(sink.wait_for_failure()) == "the engine failed: MemoryError"


def test_a_dead_engine_can_be_stopped(start, sink):
    loop = start(ScriptedModel(before_step=failing_at(1, ValueError("bad"))))
    loop.submit([make_request("a", [3])])
    sink.wait_for_failure()
    assert loop.stop(timeout=PATIENCE)


def test_a_sink_that_raises_ends_the_engine(start, sink, monkeypatch):
    def raise_error(outputs) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(sink, "put", raise_error)
    start().submit([make_request("a", [3], max_new_tokens=1)])
    assert "disk full" in str(sink.wait_for_failure())


def test_an_idle_loop_does_not_spin(start, sink):
    model = ScriptedModel()
    loop = start(model)
    engine_steps = []
    step = loop._engine.step
    loop._engine.step = lambda: engine_steps.append(1) or step()
    loop.submit([make_request("a", [3], max_new_tokens=3)])
    sink.wait_for(1)
    loop.submit([make_request("b", [3], max_new_tokens=3)])
    sink.wait_for(2)
    loop.stop(timeout=PATIENCE)
    assert model.num_steps == 6
    assert len(engine_steps) <= 7  # the last may only take the news of the stop


def test_a_running_request_is_cancelled_from_another_thread(start, sink):
    gate = Gate(step=2)
    loop = start(ScriptedModel(before_step=gate))
    loop.submit([make_request("a", [3]), make_request("b", [3], max_new_tokens=5)])
    assert gate.reached.wait(PATIENCE)
    loop.cancel("a")
    gate.opened.set()
    sink.wait_for(2)
    assert sink.outputs["a"].status is RequestStatus.CANCELLED
    assert sink.outputs["a"].generated_tokens == [4, 5]
    assert sink.outputs["b"].generated_tokens == [4, 5, 6, 7, 8]


def test_cancelling_an_unknown_request_is_ignored(start, sink):
    loop = start()
    loop.cancel("nobody")
    loop.submit([make_request("a", [3], max_new_tokens=1)])
    sink.wait_for(1)
    assert list(sink.outputs) == ["a"]


def test_every_request_ends_in_exactly_one_output(start, sink, monkeypatch):
    counts: dict[str, int] = {}
    put = sink.put

    def count(outputs) -> None:
        for output in outputs:
            counts[output.request_id] = counts.get(output.request_id, 0) + 1
        put(outputs)

    monkeypatch.setattr(sink, "put", count)
    loop = start(max_requests=3, num_blocks=12)
    for number in range(30):
        loop.submit([make_request(str(number), [3] * (number % 5), max_new_tokens=1 + number % 7)])
        loop.cancel(str(number // 2))
    assert loop.stop(timeout=PATIENCE)
    assert counts == {str(number): 1 for number in range(30)}


@pytest.mark.parametrize(("seconds_left", "num_tokens"), [(3600.0, 4), (0.0, 2)])
def test_winding_down_cancels_what_waits_and_at_the_deadline_what_runs(
    start, sink, seconds_left, num_tokens
):
    gate = Gate(step=2)
    loop = start(ScriptedModel(before_step=gate), max_requests=1)
    loop.submit([make_request("runs", [3], max_new_tokens=4), make_request("waits", [3])])
    assert gate.reached.wait(PATIENCE)
    loop.wind_down(time.monotonic() + seconds_left)
    gate.opened.set()
    sink.wait_for(2)
    assert sink.outputs["waits"].status is RequestStatus.CANCELLED
    assert sink.outputs["runs"].generated_tokens == [4, 5, 6, 7][:num_tokens]


def test_stats_are_those_of_the_last_step(start, sink):
    loop = start()
    loop.submit([make_request("a", [3], max_new_tokens=4)])
    loop.stop(timeout=PATIENCE)
    assert loop.stats().num_generated_tokens == 4
    assert loop.stats().num_running == 0


@pytest.mark.parametrize("num_pauses_before", [0, 1])
def test_a_pause_begins_between_two_steps_and_none_runs_in_it(start, sink, num_pauses_before):
    gate = Gate(step=2)
    model = ScriptedModel(before_step=gate)
    loop = start(model, max_context=10**6, num_blocks=10**5)
    for _ in range(num_pauses_before):
        loop.pause()
        loop.resume()
    loop.submit([make_request("a", [3])])
    assert gate.reached.wait(PATIENCE)
    pausing = threading.Thread(target=loop.pause, daemon=True)
    pausing.start()
    pausing.join(0.02)
    assert pausing.is_alive()  # the second step is not over
    gate.opened.set()
    pausing.join(PATIENCE)
    assert model.num_steps == 2
    loop.cancel("a")
    sink.wait_for(1)
    assert sink.outputs["a"].generated_tokens == [4, 5]
    assert model.num_steps == 2
    loop.resume()


def test_a_paused_loop_takes_requests_and_runs_them_after_the_last_resume(start, sink):
    model = ScriptedModel()
    loop = start(model)
    loop.pause()
    loop.pause()
    loop.submit([make_request("a", [3], max_new_tokens=2), make_request("wrong", [])])
    sink.wait_for(1)
    assert list(sink.outputs) == ["wrong"]
    loop.resume()
    assert model.num_steps == 0
    loop.resume()
    sink.wait_for(2)
    assert sink.outputs["a"].generated_tokens == [4, 5]


def test_a_pause_right_after_a_resume_holds(start, sink):
    model = ScriptedModel()
    loop = start(model)
    for number in range(50):
        loop.pause()
        num_steps = model.num_steps
        loop.submit([make_request(str(number), [3], max_new_tokens=3)])
        assert model.num_steps == num_steps
        loop.resume()
    sink.wait_for(50)


def test_a_hard_stop_cancels_in_a_pause_and_ends_after_it(start, sink):
    loop = start(max_context=10**6, num_blocks=10**5)
    loop.submit([make_request("a", [3])])
    loop.pause()
    assert not loop.stop(hard_stop=True, timeout=0.01)
    sink.wait_for(1)
    assert sink.outputs["a"].status is RequestStatus.CANCELLED
    loop.resume()
    assert loop.stop(timeout=PATIENCE)


def test_a_pause_of_a_loop_that_has_ended_raises(start):
    loop = start()
    loop.stop(timeout=PATIENCE)
    with pytest.raises(EngineError, match="stopped"):
        loop.pause()


def test_prefixes_are_forgotten_after_a_pause_and_before_the_next_step(start, sink, monkeypatch):
    model = ScriptedModel()
    loop = start(model)
    loop.submit([make_request("a", [3], max_new_tokens=1)])
    sink.wait_for(1)
    resets = []
    monkeypatch.setattr(
        loop._engine, "reset_prefix_cache", lambda: resets.append(model.num_steps), raising=False
    )
    loop.submit([make_request("b", [3], max_new_tokens=1)])
    sink.wait_for(2)
    loop.pause()
    loop.resume()
    loop.submit([make_request("c", [3], max_new_tokens=2)])
    sink.wait_for(3)
    assert resets == [2]


def test_a_queue_takes_a_group_piece_by_piece(sink):
    gate = Gate(step=2)
    engine = make_scripted_engine(ScriptedModel(before_step=gate), max_requests=1)
    loop = EngineLoop(engine, sink, max_queue_size=2)
    loop.start()
    loop.submit([make_request("runs", [3], max_new_tokens=2)])
    assert gate.reached.wait(PATIENCE)
    group = [make_request(str(number), [3], max_new_tokens=1) for number in range(9)]
    submitting = threading.Thread(target=loop.submit, args=(group,), daemon=True)
    submitting.start()
    submitting.join(0.02)
    assert submitting.is_alive()
    gate.opened.set()
    submitting.join(PATIENCE)
    sink.wait_for(10)
    assert loop.stop(timeout=PATIENCE)


def test_a_queue_holds_no_more_than_it_may(sink):
    waiting = []
    engine = make_scripted_engine(ScriptedModel(), max_requests=1)
    loop = EngineLoop(
        engine, sink, max_queue_size=3, on_step=lambda: waiting.append(engine.stats().num_waiting)
    )
    loop.start()
    loop.submit([make_request(str(number), [3], max_new_tokens=2) for number in range(20)])
    sink.wait_for(20)
    assert loop.stop(timeout=PATIENCE)
    assert max(waiting) <= 3
