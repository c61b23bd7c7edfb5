"""Managers that stay with their model between two calls: what is kept, and what is new."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

import cbgen
from cbgen.manager.manager import persistent_manager_of
from tests.helpers.models import greedy_reference, random_model, tiny_config, tiny_reference

PROMPT = (3, 1, 4, 1, 5)


@pytest.fixture
def own_model():
    model = random_model(LlamaForCausalLM, tiny_config("llama"))
    yield model
    cbgen.destroy_cached_continuous_batching_manager(model)


def test_a_persistent_manager_answers_again_and_goes_on_numbering(own_model):
    first = cbgen.generate_batch(own_model, [PROMPT], max_new_tokens=3, persistent_manager=True)
    second = cbgen.generate_batch(own_model, [PROMPT], max_new_tokens=3, persistent_manager=True)
    assert (list(first), list(second)) == (["req_0"], ["req_1"])
    assert first["req_0"].generated_tokens == second["req_1"].generated_tokens


def test_a_persistent_manager_keeps_its_engine_and_applies_new_settings(own_model):
    options = {"persistent_manager": True}
    cbgen.generate_batch(own_model, [PROMPT], max_new_tokens=3, **options)
    kept = persistent_manager_of(own_model)
    engine = kept._engine.built.engine
    outputs = cbgen.generate_batch(
        own_model,
        [PROMPT],
        GenerationConfig(max_new_tokens=4, do_sample=True, temperature=50.0),
        {"return_logprobs": True, "seed": 3},
        **options,
    )
    assert persistent_manager_of(own_model) is kept
    assert kept._engine.built.engine is engine
    (output,) = outputs.values()
    assert output.generated_tokens != tiny_reference("llama", PROMPT, 4)
    assert len(output.logprobs) == 4


def test_a_persistent_manager_builds_another_engine_where_settings_need_one(own_model):
    cbgen.generate_batch(own_model, [PROMPT], max_new_tokens=3, persistent_manager=True)
    cbgen.generate_batch(
        own_model,
        [PROMPT],
        GenerationConfig(max_new_tokens=3),
        {"page_size": 8},
        persistent_manager=True,
    )
    assert persistent_manager_of(own_model)._engine.built.plan.cache.page_size == 8


def test_a_persistent_manager_sees_weights_that_changed_between_two_calls(own_model):
    prompt = list(range(1, 60))
    batching = {"page_size": 8}
    config = GenerationConfig(max_new_tokens=6)
    cbgen.generate_batch(own_model, [prompt], config, batching, persistent_manager=True)
    with torch.no_grad():
        for parameter in own_model.parameters():
            parameter.mul_(-0.7)
    outputs = cbgen.generate_batch(own_model, [prompt], config, batching, persistent_manager=True)
    assert outputs["req_1"].generated_tokens == greedy_reference(own_model, prompt, 6)


@pytest.mark.parametrize(
    ("num_requests", "is_kept"), [(4, True), (3, True), (5, False), (0, False)]
)
def test_an_engine_that_was_sized_for_less_work_is_built_anew(own_model, num_requests, is_kept):
    manager = cbgen.init_continuous_batching(
        own_model, workload_hints=cbgen.WorkloadHints(num_requests=4)
    )
    manager.start()
    manager.stop(keep_for_next_session=True)
    hints = cbgen.WorkloadHints(num_requests=num_requests)
    assert cbgen.init_continuous_batching(own_model, workload_hints=hints) is manager
    assert manager.warmed_up is is_kept


def test_a_persistent_manager_serves_a_model_that_was_converted_meanwhile(own_model):
    cbgen.generate_batch(own_model, [PROMPT], max_new_tokens=1, persistent_manager=True)
    own_model.double()
    outputs = cbgen.generate_batch(own_model, [PROMPT], max_new_tokens=6, persistent_manager=True)
    assert outputs["req_1"].generated_tokens == greedy_reference(own_model, PROMPT, 6)


def test_a_running_manager_refuses_another_engine_by_name(own_model):
    manager = cbgen.init_continuous_batching(own_model)
    manager.start()
    manager.stop(keep_for_next_session=True)
    manager.start()
    with pytest.raises(cbgen.UsageError, match="page_size cannot change while the manager runs"):
        cbgen.init_continuous_batching(own_model, continuous_batching_config={"page_size": 8})
    assert cbgen.init_continuous_batching(own_model) is manager
    manager.destroy()


def test_a_destroyed_manager_is_not_returned_again(own_model):
    cbgen.generate_batch(own_model, [PROMPT], max_new_tokens=1, persistent_manager=True)
    cbgen.destroy_cached_continuous_batching_manager(own_model)
    assert persistent_manager_of(own_model) is None
    assert list(cbgen.generate_batch(own_model, [PROMPT], max_new_tokens=1)) == ["req_0"]


def test_a_model_with_a_persistent_manager_can_be_copied_and_pickled(own_model):
    cbgen.generate_batch(own_model, [PROMPT], max_new_tokens=1, persistent_manager=True)
    for twin in (copy.deepcopy(own_model), pickle.loads(pickle.dumps(own_model))):
        assert persistent_manager_of(twin) is None
        assert list(cbgen.generate_batch(twin, [PROMPT], max_new_tokens=1)) == ["req_0"]


def test_a_kept_manager_that_runs_is_used_and_left_running(own_model):
    manager = cbgen.init_continuous_batching(own_model, GenerationConfig(max_new_tokens=200))
    manager.start()
    manager.stop(keep_for_next_session=True)
    manager.start()
    manager.add_request(PROMPT, request_id="mine")
    outputs = cbgen.generate_batch(own_model, [PROMPT], max_new_tokens=2)
    assert len(outputs["req_0"].generated_tokens) == 2
    assert manager.is_running()
    assert len(manager.get_result("mine").generated_tokens) == 200
    manager.destroy()
