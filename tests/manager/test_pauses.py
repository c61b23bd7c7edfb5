"""A pause holds every manager of the model, so that weights can be changed in place."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

import cbgen
from tests.helpers.managers import PATIENCE
from tests.helpers.models import greedy_reference, random_model, tiny_config

PROMPT = (3, 1, 4, 1, 5)


@pytest.fixture
def model():
    return random_model(LlamaForCausalLM, tiny_config("llama"))


@pytest.fixture
def manager_of(model):
    managers = []

    def make():
        manager = cbgen.init_continuous_batching(model, GenerationConfig(max_new_tokens=6))
        managers.append(manager)
        manager.start()
        return manager

    yield make
    for manager in managers:
        if manager.is_running():
            manager.stop(hard_stop=True, timeout=PATIENCE)
        manager.discard()


def test_a_pause_holds_the_other_managers_of_the_model(model, manager_of):
    first, second = manager_of(), manager_of()
    old = greedy_reference_of_a_free(model, first)
    with first.pause():
        assert model.config._attn_implementation == "sdpa"
        second.add_request(PROMPT, request_id="a")
        assert second.get_result("a", timeout=0.02) is None
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        new = greedy_reference(model, PROMPT, 6)
    assert second.get_result("a", timeout=PATIENCE).generated_tokens == new != old


def greedy_reference_of_a_free(model, manager):
    with manager.pause():
        return greedy_reference(model, PROMPT, 6)


def test_other_models_go_on_in_a_pause(manager_of):
    other = random_model(LlamaForCausalLM, tiny_config("llama"))
    with manager_of().pause():
        assert len(cbgen.generate_batch(other, [PROMPT], max_new_tokens=3)) == 1


def test_pauses_of_two_managers_may_be_held_together(model, manager_of):
    first, second = manager_of(), manager_of()
    with first.pause():
        with second.pause():
            pass
        assert model.config._attn_implementation == "sdpa"
        first.add_request(PROMPT, request_id="a")
        assert first.get_result("a", timeout=0.02) is None
    assert first.get_result("a", timeout=PATIENCE).is_finished()


def test_no_manager_stops_or_starts_inside_of_a_pause_of_its_model(model, manager_of):
    first, second = manager_of(), manager_of()
    third = cbgen.init_continuous_batching(model)
    with first.pause():
        for call in (second.stop, second.destroy, second.join, third.start, third.warmup):
            with pytest.raises(RuntimeError, match=r"inside of a pause\(\) of its model"):
                call()
        with pytest.raises(RuntimeError, match="leave the pause first"):
            cbgen.generate_batch(model, [PROMPT], max_new_tokens=2)
    assert second.is_running()


def test_a_manager_that_another_thread_starts_waits_for_the_end_of_the_pause(model, manager_of):
    outputs = {}
    with manager_of().pause():
        starting = threading.Thread(
            target=lambda: outputs.update(cbgen.generate_batch(model, [PROMPT], max_new_tokens=2)),
            daemon=True,
        )
        starting.start()
        starting.join(0.05)
        assert starting.is_alive()
        assert model.config._attn_implementation == "sdpa"
    starting.join(PATIENCE)
    assert len(outputs["req_0"].generated_tokens) == 2


def test_requests_can_be_added_in_a_pause_to_a_manager_that_waits_for_its_start(model, manager_of):
    third = cbgen.init_continuous_batching(model, GenerationConfig(max_new_tokens=2))
    users, starting = third._engine._shared, threading.Thread(target=third.start, daemon=True)
    waits, wait_for = threading.Event(), users._changed.wait_for

    def noted_wait(predicate) -> bool:
        waits.set()
        return wait_for(predicate)

    with manager_of().pause():
        users._changed.wait_for = noted_wait
        starting.start()
        assert waits.wait(PATIENCE)
        adding = threading.Thread(target=third.add_request, args=(PROMPT, "a"), daemon=True)
        adding.start()
        adding.join(PATIENCE)
        assert not adding.is_alive()
    starting.join(PATIENCE)
    assert len(third.get_result("a", timeout=PATIENCE).generated_tokens) == 2
    third.destroy()


def test_a_manager_whose_sibling_has_died_can_be_paused(model, manager_of, monkeypatch):
    first, second = manager_of(), manager_of()
    monkeypatch.setattr(second._engine.built.engine, "add", lambda request: request.no_such_thing)
    second.add_request(PROMPT, request_id="a")
    with pytest.raises(cbgen.EngineDied, match=r"AttributeError: .*no_such_thing"):
        second.get_result("a", timeout=PATIENCE)
    with first.pause():
        assert model.config._attn_implementation == "sdpa"


def test_a_manager_that_is_just_ending_has_given_the_model_back_in_a_pause(model, manager_of):
    first, second = manager_of(), manager_of()
    has_ended, may_go_on, close = threading.Event(), threading.Event(), second._engine.close

    def close_late(failure) -> None:
        has_ended.set()
        assert may_go_on.wait(PATIENCE)
        close(failure)

    second._engine.close = close_late
    second.stop(block=False)
    assert has_ended.wait(PATIENCE)
    with first.pause():
        assert model.config._attn_implementation == "sdpa"
    may_go_on.set()


def test_a_pause_that_is_interrupted_holds_nothing(manager_of, monkeypatch):
    first, second = manager_of(), manager_of()
    monkeypatch.setattr(
        second._engine.loop._has_parked, "wait_for", lambda _predicate: raise_(KeyboardInterrupt())
    )
    with pytest.raises(KeyboardInterrupt), first.pause():
        pass
    for manager in (first, second):
        manager.add_request(PROMPT, request_id="a")
        assert manager.get_result("a", timeout=PATIENCE).is_finished()


def raise_(error: BaseException) -> None:
    raise error


def test_outputs_cannot_be_waited_for_in_a_pause_without_a_timeout(manager_of):
    first, second = manager_of(), manager_of()
    second.add_request(PROMPT, request_id="done")
    done = second.request_id_iter("done")
    assert next(done).is_finished()
    with first.pause():
        second.add_request(PROMPT, request_id="a")
        for wait in (
            lambda: list(second),
            lambda: second.get_result("a"),
            lambda: list(second.request_id_iter("a")),
            lambda: list(second.as_completed(["a"])),
        ):
            with pytest.raises(RuntimeError, match=r"inside of a pause\(\)"):
                wait()
    assert second.get_result("a", timeout=PATIENCE).is_finished()


def test_outputs_that_are_there_can_be_fetched_in_a_pause(manager_of):
    manager = manager_of()
    manager.add_request(PROMPT, request_id="a")
    manager.add_request(PROMPT, request_id="b")
    assert manager.get_result("b", timeout=PATIENCE).is_finished()
    with manager.pause():  # the request that was added first has ended as well
        assert manager.get_result("a").is_finished()
        assert list(manager) == []
