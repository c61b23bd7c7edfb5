"""Fetching outputs: the right one to whoever waits, in time, once; cancelling; wrong requests."""

from __future__ import annotations

import threading
import time

import pytest

import cbgen
from cbgen.engine.request import RequestStatus
from tests.helpers.managers import PATIENCE, Gate, run_threads
from tests.helpers.models import VOCAB_SIZE, tiny_model
from tests.helpers.scripted import ScriptedModel

LONG = {"max_context": 10**6, "num_blocks": 10**5}


def gated(step: int) -> tuple[Gate, ScriptedModel]:
    gate = Gate(step)
    return gate, ScriptedModel(vocab_size=VOCAB_SIZE, before_step=gate)


def test_iteration_ends_when_everything_added_so_far_is_answered(scripted):
    manager = scripted()
    manager.add_request([3], request_id="a", max_new_tokens=4)
    manager.add_request([5], request_id="b", max_new_tokens=1)
    results = {result.request_id: result.generated_tokens for result in manager}
    assert results == {"a": [4, 5, 6, 7], "b": [6]}
    assert list(manager) == []


def test_iteration_waits_for_a_first_request(scripted):
    manager = scripted()
    results = []
    reader = threading.Thread(target=lambda: results.extend(manager), daemon=True)
    reader.start()
    manager.add_request([3], max_new_tokens=2)
    reader.join(PATIENCE)
    assert [result.generated_tokens for result in results] == [[4, 5]]


def test_requests_added_while_iterating_are_yielded_too(scripted):
    manager = scripted()
    manager.add_request([1], max_new_tokens=1)
    seen = []
    for result in manager:
        seen.append(result.request_id)
        if len(seen) < 5:
            manager.add_request([1], max_new_tokens=1)
    assert seen == [f"req_{number}" for number in range(5)]


def test_several_iterations_share_the_outputs_and_all_end(scripted):
    manager = scripted()
    seen: list[str] = []
    lock = threading.Lock()

    def read() -> None:
        for result in manager:
            with lock:
                seen.append(result.request_id)

    names = [manager.add_request([1], max_new_tokens=3) for _ in range(40)]
    run_threads([read] * 6)
    assert sorted(seen) == sorted(names)


def test_an_iteration_that_waits_ends_when_another_one_gets_the_last_output(scripted):
    gate, model = gated(1)
    manager = scripted(model)
    manager.add_request([1], max_new_tokens=1)
    seen = []

    def open_the_gate() -> None:
        while len(manager._router._waiters.get(None, ())) < 3:
            time.sleep(0.001)
        gate.opened.set()

    run_threads([lambda: seen.extend(manager)] * 3 + [open_the_gate])
    assert [output.generated_tokens for output in seen] == [[2]]


def test_iteration_ends_when_the_manager_stops(scripted):
    manager = scripted()
    reader = threading.Thread(target=lambda: list(manager), daemon=True)
    reader.start()
    manager.stop()
    reader.join(PATIENCE)
    assert not reader.is_alive()


def test_a_hundred_waiters_each_get_their_own_result(scripted):
    manager = scripted()
    got = {}

    def wait(number: int) -> None:
        got[number] = manager.get_result(f"r{number}", timeout=PATIENCE).generated_tokens

    def add() -> None:
        for number in reversed(range(100)):
            manager.add_request([number], request_id=f"r{number}", max_new_tokens=1)

    run_threads([*(lambda n=n: wait(n) for n in range(100)), add])
    assert got == {number: [number + 1] for number in range(100)}


def test_a_wait_ends_in_time_whatever_others_get(scripted):
    manager = scripted()
    started = time.monotonic()
    for _ in range(20):
        manager.add_request([1], max_new_tokens=1)
    assert manager.get_result("nobody", timeout=0.05) is None
    assert 0.05 <= time.monotonic() - started < 5


def test_a_result_that_nobody_waits_for_is_kept_for_its_id(scripted):
    manager = scripted()
    manager.add_request([1], request_id="a", max_new_tokens=1)
    manager.add_request([5], request_id="b", max_new_tokens=1)
    assert manager.get_result("b", timeout=PATIENCE).generated_tokens == [6]
    assert manager.get_result(timeout=PATIENCE).request_id == "a"


def test_a_result_is_given_once(scripted):
    manager = scripted()
    manager.add_request([1], request_id="a", max_new_tokens=1)
    assert manager.get_result("a", timeout=PATIENCE) is not None
    assert manager.get_result("a", timeout=0) is None


def test_results_can_be_fetched_after_a_stop(scripted):
    manager = scripted()
    manager.add_request([1], request_id="a", max_new_tokens=1)
    manager.add_request([1], request_id="b", max_new_tokens=1)
    manager.stop()
    assert manager.get_result("b").request_id == "b"
    assert [result.request_id for result in manager] == ["a"]
    assert manager.get_result() is None


def test_nobody_waits_for_a_manager_that_was_never_started(monkeypatch):
    manager = cbgen.init_continuous_batching(tiny_model("llama"))
    assert manager.get_result() is None
    assert list(manager) == []
    manager.destroy()


def test_as_completed_yields_the_shortest_first(scripted):
    manager = scripted()
    ids = manager.add_requests(
        [[1], [1], [1]],
        request_ids=["c", "a", "b"],
        generation_configs=[{"max_new_tokens": 9}, {"max_new_tokens": 1}, {"max_new_tokens": 5}],
    )
    manager.add_request([1], request_id="other", max_new_tokens=1)
    assert [output.request_id for output in manager.as_completed(ids)] == ["a", "b", "c"]
    assert manager.get_result(timeout=PATIENCE).request_id == "other"


def test_outputs_of_requests_that_are_added_to_be_answered_go_to_nobody_else(scripted):
    manager = scripted()
    prompts, fields = [[1], [2], [3]], {"max_new_tokens": 1}
    ids, outputs = manager.answer(prompts, fields, record_timestamps=False)
    assert manager.get_result(timeout=0.02) is None
    seen: list[str] = []
    run_threads([lambda: seen.extend(output.request_id for output in outputs)])
    assert sorted(seen) == sorted(ids)


def test_a_running_request_is_cancelled_with_its_tokens(scripted):
    gate, model = gated(3)
    manager = scripted(model, **LONG)
    manager.add_request([1], request_id="a")
    assert gate.reached.wait(PATIENCE)
    manager.cancel_request("a")
    gate.opened.set()
    output = manager.get_result("a", timeout=PATIENCE)
    assert output.status is RequestStatus.CANCELLED
    assert output.finish_reason == "cancelled"
    assert output.generated_tokens == [2, 3, 4]


def test_a_waiting_request_is_cancelled(scripted):
    gate, model = gated(1)
    manager = scripted(model, max_requests=1)
    manager.add_request([1], request_id="runs", max_new_tokens=2)
    assert gate.reached.wait(PATIENCE)
    manager.add_request([1], request_id="waits", max_new_tokens=2)
    manager.cancel_request("waits")
    gate.opened.set()
    assert manager.get_result("waits", timeout=PATIENCE).generated_tokens == []
    assert manager.get_result("runs", timeout=PATIENCE).generated_tokens == [2, 3]


def test_a_request_is_cancelled_before_the_start(monkeypatch):
    from tests.helpers.managers import scripted_manager

    manager = scripted_manager(monkeypatch)
    manager.add_request([1], request_id="a", max_new_tokens=2)
    manager.add_request([1], request_id="b", max_new_tokens=2)
    manager.cancel_request("a")
    assert manager.get_result("a").status is RequestStatus.CANCELLED
    manager.start()
    assert manager.get_result("b", timeout=PATIENCE).generated_tokens == [2, 3]
    manager.destroy()


def test_a_single_sample_is_cancelled_before_the_start(monkeypatch):
    from tests.helpers.managers import scripted_manager

    manager = scripted_manager(monkeypatch)
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 2}
    manager.add_request([1], request_id="a", **options)
    manager.cancel_request("a__child#0")
    manager.start()
    assert {output.request_id: output.status.name for output in manager} == {
        "a": "FINISHED",
        "a__child#0": "CANCELLED",
        "a__child#1": "FINISHED",
    }
    manager.destroy()


def test_requests_go_on_after_all_running_ones_were_cancelled(scripted):
    gate, model = gated(2)
    manager = scripted(model, max_requests=2, max_context=10**6, num_blocks=10**4)
    names = manager.add_requests(
        [[1], [1], [1]], generation_configs=[{}, {}, {"max_new_tokens": 2}]
    )
    assert gate.reached.wait(PATIENCE)
    for name in names[:2]:
        manager.cancel_request(name)
    gate.opened.set()
    assert manager.get_result(names[2], timeout=PATIENCE).generated_tokens == [2, 3]


def test_cancelling_a_request_cancels_its_further_samples(scripted):
    gate, model = gated(2)
    manager = scripted(model, **LONG)
    manager.add_request([1], request_id="a", do_sample=True, num_return_sequences=3)
    assert gate.reached.wait(PATIENCE)
    manager.cancel_request("a")
    gate.opened.set()
    outputs = {output.request_id: output.status for output in manager}
    assert outputs == dict.fromkeys(("a", "a__child#0", "a__child#1"), RequestStatus.CANCELLED)


def test_a_single_sample_can_be_cancelled(scripted):
    gate, model = gated(2)
    manager = scripted(model)
    manager.add_request(
        [1], request_id="a", do_sample=True, num_return_sequences=2, max_new_tokens=4
    )
    assert gate.reached.wait(PATIENCE)
    manager.cancel_request("a__child#0")
    gate.opened.set()
    assert {output.request_id: output.status.name for output in manager} == {
        "a": "FINISHED",
        "a__child#0": "CANCELLED",
    }


def test_cancelling_what_is_unknown_or_has_ended_does_nothing(scripted):
    manager = scripted()
    manager.cancel_request("nobody")
    manager.add_request([1], request_id="a", max_new_tokens=1)
    assert manager.get_result("a", timeout=PATIENCE).status is RequestStatus.FINISHED
    manager.cancel_request("a")
    assert list(manager) == []


@pytest.mark.parametrize(
    ("prompt", "fields", "code"),
    [
        ([], {}, "empty_prompt"),
        ([10**6], {}, "token_out_of_vocabulary"),
        ([1] * 70, {}, "prompt_too_long"),
        ([1], {"temperature": -1.0}, "invalid_generation_config"),
        ([1], {"temperature": float("nan")}, "invalid_generation_config"),
        ([1], {"temperature": "hot"}, "invalid_generation_config"),
        ([1], {"top_k": -1}, "invalid_generation_config"),
        ([1], {"max_new_tokens": 0}, "invalid_generation_config"),
        ([1], {"eos_token_id": "x"}, "invalid_generation_config"),
        ([1], {"repetition_penalty": -3.0}, "invalid_generation_config"),
    ],
)
def test_a_wrong_request_fails_alone(scripted, prompt, fields, code):
    manager = scripted()
    manager.add_request([3], request_id="before", max_new_tokens=3)
    manager.add_request(prompt, request_id="wrong", **fields)
    manager.add_request([3], request_id="after", max_new_tokens=3)
    results = {result.request_id: result for result in manager}
    assert (results["wrong"].status, results["wrong"].error_code) == (RequestStatus.FAILED, code)
    assert results["wrong"].error
    assert [results[name].generated_tokens for name in ("before", "after")] == [[4, 5, 6]] * 2


@pytest.mark.parametrize(
    "fields", [{"temperature": 1}, {"top_k": 10**9}, {"top_k": 0}, {"temperature": 0}]
)
def test_values_at_the_edge_are_taken(scripted, fields):
    manager = scripted()
    manager.add_request([3], request_id="a", max_new_tokens=1, **fields)
    assert manager.get_result("a", timeout=PATIENCE).status is RequestStatus.FINISHED


def test_a_second_request_with_a_live_id_fails_and_the_first_does_not_notice(scripted):
    gate, model = gated(1)
    manager = scripted(model)
    manager.add_request([3], request_id="a", max_new_tokens=2)
    assert gate.reached.wait(PATIENCE)
    manager.add_request([8], request_id="a", max_new_tokens=2)
    second = manager.get_result(timeout=PATIENCE)
    assert (second.error_code, second.prompt_ids) == ("duplicate_id", [8])
    gate.opened.set()
    assert manager.get_result("a", timeout=PATIENCE).generated_tokens == [4, 5]


def test_an_id_can_be_used_again_once_it_is_answered(scripted):
    manager = scripted()
    for _ in range(2):
        manager.add_request([3], request_id="a", max_new_tokens=2)
        assert manager.get_result("a", timeout=PATIENCE).generated_tokens == [4, 5]


def test_names_that_are_made_up_avoid_those_that_were_given(scripted):
    gate, model = gated(1)
    manager = scripted(model)
    manager.add_request([1], request_id="req_0", max_new_tokens=1)
    assert manager.add_request([1], max_new_tokens=1) == "req_1"
    gate.opened.set()


def test_requests_of_one_call_may_have_ids_and_settings_of_their_own(scripted):
    manager = scripted()
    ids = manager.add_requests(
        [[3], [3], [3]],
        max_new_tokens=4,
        request_ids=["x", None, "z"],
        generation_configs=[None, {"max_new_tokens": 2}, {"eos_token_id": [5]}],
    )
    assert ids == ["x", "req_0", "z"]
    results = {result.request_id: result.generated_tokens for result in manager}
    assert results == {"x": [4, 5, 6, 7], "req_0": [4, 5], "z": [4, 5]}


def test_ids_must_be_as_many_as_prompts(scripted):
    with pytest.raises(ValueError, match="1 request_ids were given for 2 inputs"):
        scripted().add_requests([[1], [2]], request_ids=["a"])


def test_a_keyword_that_is_unknown_is_a_type_error_and_nothing_is_added(scripted):
    manager = scripted()
    with pytest.raises(TypeError, match="'tempreature'"):
        manager.add_request([1], tempreature=0.5)
    with pytest.raises(TypeError, match="'foo'"):
        manager.add_requests([[1], [2]], generation_configs=[{}, {"foo": 1}])
    manager.stop()
    assert manager.get_result() is None


def test_a_seed_of_its_own_makes_a_request_the_same_under_any_id(scripted):
    flat = ScriptedModel(lambda token, position: {}, vocab_size=VOCAB_SIZE)
    manager = scripted(flat)
    options = {"do_sample": True, "max_new_tokens": 12}
    manager.add_request([1], request_id="a", seed=7, **options)
    manager.add_request([1], request_id="b", seed=7, **options)
    manager.add_request([1], request_id="c", **options)
    results = {result.request_id: result.generated_tokens for result in manager}
    assert results["a"] == results["b"] != results["c"]


def test_a_full_queue_holds_the_caller_until_there_is_room(scripted):
    gate, model = gated(2)
    manager = scripted(model, queue=2, max_requests=1)
    manager.add_request([1], max_new_tokens=2)
    assert gate.reached.wait(PATIENCE)
    manager.add_request([1], max_new_tokens=1)
    manager.add_request([1], max_new_tokens=1)
    has_added = threading.Event()

    def add() -> None:
        manager.add_request([1], max_new_tokens=1)
        has_added.set()

    adding = threading.Thread(target=add, daemon=True)
    adding.start()
    assert not has_added.wait(0.05)
    gate.opened.set()
    assert has_added.wait(PATIENCE)
    adding.join(PATIENCE)
    assert len(list(manager)) == 4


def test_a_caller_who_waits_for_room_learns_of_the_stop(scripted):
    gate, model = gated(2)
    manager = scripted(model, queue=1, max_requests=1)
    manager.add_request([1], max_new_tokens=2)
    assert gate.reached.wait(PATIENCE)
    manager.add_request([1], max_new_tokens=1)
    errors = []

    def add() -> None:
        try:
            manager.add_request([1], max_new_tokens=1)
        except cbgen.ManagerStopped as error:
            errors.append(error)

    adding = threading.Thread(target=add, daemon=True)
    adding.start()
    manager.stop(block=False)
    adding.join(PATIENCE)
    assert len(errors) == 1
    gate.opened.set()
