"""An engine that dies: everybody learns the cause in time, and nothing hangs or is left lent."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

import cbgen
from tests.helpers.managers import PATIENCE, Gate, failing_at, scripted_manager
from tests.helpers.models import VOCAB_SIZE, tiny_model
from tests.helpers.scripted import ScriptedModel
from tests.helpers.sources import ROOT

LONG = {"max_context": 10**6, "num_blocks": 10**5}


def dying(step: int, cause: BaseException) -> ScriptedModel:
    return ScriptedModel(vocab_size=VOCAB_SIZE, before_step=failing_at(step, cause))


@pytest.mark.serial
def test_a_dead_engine_tells_its_cause_to_everybody_within_a_second(scripted):
    gate = Gate(3)
    cause = MemoryError("no room for 5 GiB")

    def before_step(step: int) -> None:
        gate(step)
        if step == 3:
            raise cause

    manager = scripted(ScriptedModel(vocab_size=VOCAB_SIZE, before_step=before_step), **LONG)
    manager.add_requests([[1]] * 3, request_ids=["waits", "follows", "completes"])
    assert gate.reached.wait(PATIENCE)
    calls = {
        "get": lambda: manager.get_result("waits"),
        "any": manager.get_result,
        "follow": lambda: list(manager.request_id_iter("follows")),
        "completed": lambda: list(manager.as_completed(["completes"])),
        "iterate": lambda: list(manager),
        "pause": manager.pause().__enter__,
    }
    errors: dict[str, BaseException] = {}

    def call(name: str) -> None:
        try:
            calls[name]()
        except cbgen.EngineError as error:
            errors[name] = error

    threads = [threading.Thread(target=call, args=(name,), daemon=True) for name in calls]
    for thread in threads:
        thread.start()
    started = time.monotonic()
    gate.opened.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert time.monotonic() - started < 1
    assert set(errors) == set(calls)
    assert all("no room for 5 GiB" in str(error) for error in errors.values())
    assert errors["get"].__cause__ is cause
    with pytest.raises(cbgen.EngineDied, match="no room for 5 GiB") as caught:
        manager.add_request([1])
    assert caught.value.__cause__ is cause
    assert not manager.is_running()
    assert tiny_model("llama").config._attn_implementation == "sdpa"


def test_an_engine_that_dies_in_a_pause_gives_the_model_back_for_good(scripted, monkeypatch):
    manager = scripted()

    def refuse(request) -> None:
        raise ValueError("no room")

    with manager.pause():
        monkeypatch.setattr(manager._engine.built.engine, "add", refuse)
        manager.add_request([1], request_id="a")
        with pytest.raises(cbgen.EngineDied, match="no room"):
            manager.get_result("a", timeout=PATIENCE)
    assert tiny_model("llama").config._attn_implementation == "sdpa"


def test_results_before_the_death_can_still_be_fetched(scripted):
    manager = scripted(dying(3, ValueError("bad")))
    manager.add_request([1], request_id="short", max_new_tokens=1)
    manager.add_request([1], request_id="long")
    with pytest.raises(cbgen.EngineDied) as caught:
        manager.get_result("long", timeout=PATIENCE)
    assert list(caught.value.outputs) == ["short"]
    assert manager.get_result("short").generated_tokens == [2]


def test_a_manager_can_be_started_again_after_its_engine_died(scripted):
    manager = scripted(dying(1, ValueError("bad")))
    manager.add_request([1], request_id="a", max_new_tokens=2)
    with pytest.raises(cbgen.EngineDied):
        manager.get_result("a", timeout=PATIENCE)
    manager.start()
    manager.add_request([1], request_id="a", max_new_tokens=2)
    assert manager.get_result("a", timeout=PATIENCE).generated_tokens == [2, 3]


def test_a_context_that_nobody_told_of_the_death_raises_it_at_its_end(monkeypatch):
    scripted_manager(monkeypatch, dying(1, ValueError("bad weights"))).destroy()
    with (
        pytest.raises(cbgen.EngineDied, match="bad weights"),
        cbgen.continuous_batching_context_manager(tiny_model("llama")) as manager,
    ):
        manager.add_request([1])


def test_a_context_whose_reader_was_told_of_the_death_does_not_raise_it_again(monkeypatch):
    scripted_manager(monkeypatch, dying(1, ValueError("bad weights"))).destroy()
    with cbgen.continuous_batching_context_manager(tiny_model("llama")) as manager:
        manager.add_request([1], request_id="a")
        with pytest.raises(cbgen.EngineDied):
            manager.get_result("a", timeout=PATIENCE)


EXITING = """
import cbgen
from transformers import GenerationConfig
from tests.helpers.models import tiny_model

model = tiny_model("llama")
config = GenerationConfig(max_new_tokens=200)

dying = cbgen.init_continuous_batching(model, config)
dying.start()
dying._engine.built.engine._runner._forward = lambda *arguments: 1 / 0
dying.add_request([1, 2, 3], request_id="a")
try:
    dying.get_result("a")
except cbgen.EngineDied as error:
    print(error)

forgotten = cbgen.init_continuous_batching(model, config)
forgotten.start()
forgotten.add_request([1, 2, 3], request_id="a", streaming=True)
next(forgotten.request_id_iter("a"))
raise SystemExit(7)
"""


def test_a_process_exits_by_itself_after_a_death_and_without_a_stop():
    ran = subprocess.run(
        [sys.executable, "-c", EXITING],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ran.returncode, ran.stderr) == (7, "")
    assert ran.stdout == "the engine failed: ZeroDivisionError: division by zero\n"
