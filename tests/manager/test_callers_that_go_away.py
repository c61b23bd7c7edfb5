"""Callers that go away in the middle: interrupted while they add, or closed by the collector."""

from __future__ import annotations

import threading

import pytest

from cbgen.engine.request import RequestStatus
from cbgen.manager.router import DeferringLock
from tests.helpers.managers import PATIENCE, Gate
from tests.helpers.models import VOCAB_SIZE
from tests.helpers.scripted import ScriptedModel


def test_a_stop_while_a_group_is_added_answers_what_is_queued_already(scripted):
    gate = Gate(1)
    model = ScriptedModel(vocab_size=VOCAB_SIZE, before_step=gate)
    manager = scripted(model, queue=2, max_requests=1)
    raised: list[BaseException] = []

    def add() -> None:
        try:
            manager.add_requests([[3]] * 12, max_new_tokens=2)
        except Exception as error:  # noqa: BLE001  whatever it is, the test looks at it
            raised.append(error)

    adder = threading.Thread(target=add, daemon=True)
    adder.start()
    assert gate.reached.wait(PATIENCE)  # one runs, two are queued, nine wait for room
    stopper = threading.Thread(target=manager.stop, daemon=True)
    stopper.start()
    adder.join(PATIENCE)
    gate.opened.set()
    stopper.join(PATIENCE)
    assert len(raised) == 1
    assert not manager.has_failed
    outputs = []
    while (output := manager.get_result(timeout=0)) is not None:
        outputs.append(output)
    assert outputs
    assert {output.status for output in outputs} == {RequestStatus.FINISHED}


def test_a_stream_that_the_collector_closes_under_the_lock_does_not_wait_for_it(scripted):
    manager = scripted()
    stream = manager.request_id_iter(
        manager.add_request([3], max_new_tokens=5, streaming=True, request_id="a")
    )
    next(stream)
    closed = threading.Event()

    def close_under_the_lock() -> None:
        with manager._router._lock:
            stream.close()
            closed.set()

    threading.Thread(target=close_under_the_lock, daemon=True).start()
    assert closed.wait(PATIENCE)
    assert manager.get_result("a", timeout=PATIENCE) is not None  # what it left is delivered again


def test_a_call_while_the_lock_is_held_is_made_when_it_is_free():
    called: list[str] = []
    lock = DeferringLock()
    with lock:
        lock.call(lambda: called.append("a"))
        assert called == []
    assert called == ["a"]


def test_a_deferred_call_is_made_before_the_next_holder_does_anything():
    called: list[str] = []
    lock = DeferringLock()
    lock._deferred.append(lambda: called.append("a"))
    with lock:
        assert called == ["a"]


def test_a_call_that_raises_does_not_keep_the_lock():
    def refuse() -> None:
        raise ValueError("no")

    lock = DeferringLock()
    with pytest.raises(ValueError, match="no"):
        lock.call(refuse)
    with lock:
        pass
