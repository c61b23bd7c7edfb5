"""Start, stop, restart, destroy, pause: what may follow what, and what becomes of requests."""

from __future__ import annotations

import functools
import threading
import time

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

import cbgen
from cbgen.engine.request import RequestStatus
from cbgen.manager.configs import EngineSetup
from tests.helpers.managers import PATIENCE, Gate
from tests.helpers.models import (
    VOCAB_SIZE,
    greedy_reference,
    random_model,
    tiny_config,
    tiny_model,
    tiny_reference,
)
from tests.helpers.scripted import ScriptedModel

LONG = {"max_context": 10**6, "num_blocks": 10**5}
PROMPT = (3, 1, 4, 1, 5)


def gated(step: int) -> tuple[Gate, ScriptedModel]:
    gate = Gate(step)
    return gate, ScriptedModel(vocab_size=VOCAB_SIZE, before_step=gate)


@pytest.fixture
def model():
    return random_model(LlamaForCausalLM, tiny_config("llama"))


@pytest.fixture
def manager(model):
    manager = cbgen.init_continuous_batching(model, GenerationConfig(max_new_tokens=6))
    yield manager
    if manager.is_running():
        manager.stop(hard_stop=True)
    manager.destroy()


def test_requests_may_be_added_before_the_start(manager):
    manager.add_request(PROMPT, request_id="a")
    assert not manager.is_running()
    manager.start()
    assert manager.is_running()
    assert manager.get_result("a").generated_tokens == tiny_reference("llama", PROMPT, 6)


def test_a_second_start_changes_nothing_and_says_so(manager, caplog):
    manager.start()
    manager.start()
    assert "runs already" in caplog.text


def test_warming_up_builds_the_engine(manager):
    assert not manager.warmed_up
    manager.warmup()
    assert manager.warmed_up
    manager.start()
    request_id = manager.add_request(PROMPT)
    assert manager.get_result(request_id).generated_tokens == tiny_reference("llama", PROMPT, 6)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_restart_answers_as_before(model, manager, implementation, keeps):
    model.set_attn_implementation(implementation)
    for _ in range(3):
        manager.start()
        request_id = manager.add_request(PROMPT)
        assert manager.get_result(request_id).generated_tokens == tiny_reference("llama", PROMPT, 6)
        manager.stop(keep_for_next_session=keeps)
        assert model.config._attn_implementation == implementation


def test_adding_after_a_stop_raises(scripted):
    manager = scripted()
    manager.stop()
    with pytest.raises(cbgen.ManagerStopped, match=r"was stopped .* start\(\) lets it"):
        manager.add_request([1])
    with pytest.raises(RuntimeError):
        manager.add_requests([[1]])


def test_starting_after_destroy_raises(scripted):
    manager = scripted()
    manager.destroy()
    manager.destroy()
    for call in (manager.start, manager.warmup, lambda: manager.add_request([1])):
        with pytest.raises(RuntimeError, match="was destroyed"):
            call()


def test_stopping_a_manager_that_does_not_run_says_so(manager, caplog):
    manager.stop()
    assert "does not run" in caplog.text


def test_a_stop_that_takes_too_long_returns_in_time_and_goes_on(scripted, caplog):
    gate, model = gated(2)
    manager = scripted(model)
    manager.add_request([1], request_id="a", max_new_tokens=4)
    assert gate.reached.wait(PATIENCE)
    manager.stop(timeout=0.01)
    assert "did not end within 0.01 s" in caplog.text
    with pytest.raises(RuntimeError, match="still stopping"):
        manager.start()
    assert tiny_model("llama").config._attn_implementation == "cbgen"
    gate.opened.set()
    assert manager.get_result("a", timeout=PATIENCE).generated_tokens == [2, 3, 4, 5]
    manager.stop()
    assert tiny_model("llama").config._attn_implementation == "sdpa"


def test_a_manager_that_starts_while_its_last_session_still_ends_answers(scripted, monkeypatch):
    manager = scripted()
    ends, has_started, close = threading.Event(), threading.Event(), manager._router.close

    def close_late(failure=None) -> None:
        ends.set()
        has_started.wait(0.1)
        close(failure)

    monkeypatch.setattr(manager._router, "close", close_late)
    manager.stop(block=False)
    assert ends.wait(PATIENCE)
    manager.start()
    has_started.set()
    manager.add_request([1], request_id="a", max_new_tokens=1)
    assert manager.get_result("a", timeout=PATIENCE).generated_tokens == [2]


def test_joining_waits_for_the_end_and_asks_for_none(scripted, caplog):
    manager = scripted()
    manager.join(timeout=0.01)
    assert manager.is_running()
    assert "did not end within 0.01 s" in caplog.text
    manager.stop(block=False)
    manager.join(time.perf_counter(), PATIENCE)
    assert not manager.is_running()
    manager.join()


def test_a_hard_stop_fails_running_and_waiting_requests_with_their_tokens(scripted):
    gate, model = gated(3)
    manager = scripted(model, max_requests=1, **LONG)
    manager.add_requests([[1], [1], [1]], request_ids=["runs", "waits", "cancelled"])
    assert gate.reached.wait(PATIENCE)
    manager.cancel_request("cancelled")
    manager.stop(block=False, hard_stop=True)
    gate.opened.set()
    manager.stop()
    results = {result.request_id: result for result in iter(manager.get_result, None)}
    assert results["runs"].generated_tokens == [2, 3, 4]
    assert results["waits"].generated_tokens == []
    for name in ("runs", "waits"):
        assert results[name].status is RequestStatus.FAILED
        assert results[name].error_code == "hard_stop"
    assert results["cancelled"].status is RequestStatus.CANCELLED


def test_leaving_a_context_answers_everything(model):
    with cbgen.continuous_batching_context_manager(
        model, GenerationConfig(max_new_tokens=6)
    ) as manager:
        ids = manager.add_requests([PROMPT] * 3)
    assert {result.request_id for result in iter(manager.get_result, None)} == set(ids)
    assert manager.is_destroyed


def test_an_exception_in_a_context_ends_unfinished_requests_at_once(model):
    config = GenerationConfig(max_new_tokens=240)
    managers = []

    def work() -> None:
        with cbgen.continuous_batching_context_manager(model, config) as manager:
            managers.append(manager)
            manager.add_request(PROMPT)
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert not managers[0].is_running()
    assert managers[0].get_result().status is RequestStatus.FAILED


def test_an_interrupted_wait_at_the_end_of_a_context_ends_what_is_unfinished(model, monkeypatch):
    managers = []

    def interrupted(stop, *, hard_stop: bool, **options) -> bool:
        if not hard_stop:
            raise KeyboardInterrupt
        return stop(hard_stop=hard_stop, **options)

    def work() -> None:
        config = GenerationConfig(max_new_tokens=240)
        with cbgen.continuous_batching_context_manager(model, config) as manager:
            managers.append(manager)
            manager.add_request(PROMPT)
            stop = manager._engine.stop
            monkeypatch.setattr(manager._engine, "stop", functools.partial(interrupted, stop))

    with pytest.raises(KeyboardInterrupt):
        work()
    assert managers[0].get_result().status is RequestStatus.FAILED
    assert model.config._attn_implementation == "sdpa"


def test_no_step_runs_in_a_pause_and_requests_go_on_after_it(scripted):
    gate, model = gated(2)
    manager = scripted(model, **LONG)
    manager.add_request([1], request_id="a", max_new_tokens=50)
    assert gate.reached.wait(PATIENCE)
    gate.opened.set()
    with manager.pause():
        num_steps = model.num_steps
        manager.add_request([5], request_id="b", max_new_tokens=2)
        manager.add_request([5], request_id="c", max_new_tokens=2)
        manager.cancel_request("b")
        assert manager.get_result("b", timeout=PATIENCE).status is RequestStatus.CANCELLED
        time.sleep(0.02)  # time in which a step would run, if one could
        assert model.num_steps == num_steps
    assert manager.get_result("c", timeout=PATIENCE).generated_tokens == [6, 7]
    assert len(manager.get_result("a", timeout=PATIENCE).generated_tokens) == 50


def test_a_full_queue_does_not_hold_the_thread_that_pauses(scripted):
    manager = scripted(queue=1)
    with manager.pause():
        names = manager.add_requests([[1]] * 5, max_new_tokens=1)
    assert {result.request_id for result in manager} == set(names)


def test_several_threads_may_hold_a_pause(scripted):
    manager = scripted()
    entered = threading.Barrier(3)
    left = threading.Event()

    def hold() -> None:
        with manager.pause():
            entered.wait(PATIENCE)
            left.wait(PATIENCE)

    threads = [threading.Thread(target=hold, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    entered.wait(PATIENCE)
    request_id = manager.add_request([1], max_new_tokens=1)
    assert manager.get_result(request_id, timeout=0.02) is None
    left.set()
    assert manager.get_result(request_id, timeout=PATIENCE).generated_tokens == [2]
    for thread in threads:
        thread.join(PATIENCE)


def test_a_stop_inside_of_a_pause_raises(scripted):
    manager = scripted()
    with manager.pause(), pytest.raises(RuntimeError, match=r"inside of a pause\(\) of its model"):
        manager.stop()
    manager.stop()


def test_a_stop_from_another_thread_waits_for_the_pause(scripted):
    manager = scripted()
    with manager.pause():
        manager.add_request([1], request_id="a", max_new_tokens=1)
        stopping = threading.Thread(target=manager.stop, daemon=True)
        stopping.start()
        stopping.join(0.02)
        assert stopping.is_alive()
    stopping.join(PATIENCE)
    assert manager.get_result("a").generated_tokens == [2]


def test_pausing_a_manager_that_does_not_run_raises(manager):
    with pytest.raises(RuntimeError, match="does not run"), manager.pause():
        pass


def test_a_paused_model_can_be_run_and_trained(model, manager):
    model.train()
    manager.start()
    manager.add_request(PROMPT, request_id="a", max_new_tokens=100)
    with manager.pause():
        assert model.training
        assert model.config._attn_implementation == "sdpa"
        loss = model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss
        loss.backward()
        assert model.lm_head.weight.grad is not None
    output = manager.get_result("a", timeout=PATIENCE)
    assert output.generated_tokens == tiny_reference("llama", PROMPT, 100)


def test_weights_changed_in_a_pause_count_from_then_on_with_nothing_cached(model, manager):
    prompt = list(range(1, 70))
    manager._engine.change_setup(EngineSetup(config=cbgen.ContinuousBatchingConfig(page_size=8)))
    manager.start()
    manager.get_result(manager.add_request(prompt))
    with manager.pause():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-0.7)
        expected = greedy_reference(model, prompt, 6)
    assert manager.get_result(manager.add_request(prompt)).generated_tokens == expected
