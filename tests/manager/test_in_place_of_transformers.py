"""The uses that transformers documents, as a user of transformers writes them, over cbgen.

The functions are bound to the model class; nothing else of a program changes.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.generation import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import RequestStatus

import cbgen
from tests.helpers.models import greedy_reference, tiny_model

PROMPTS = ["What's up?", "Name a cat breed.", "Write a detailed history of quantum mechanics."]


@pytest.fixture
def model(checkpoint, bound):
    loaded = AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation="sdpa", device_map=None, dtype=torch.float32
    )
    bound(type(loaded))
    return loaded


@pytest.fixture
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture
def generation_config(tokenizer):
    return GenerationConfig(max_new_tokens=8, eos_token_id=tokenizer.eos_token_id)


@pytest.fixture
def inputs(tokenizer):
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture
def answers(model, inputs):
    """What plain generate answers; a model that is lent cannot be asked."""
    return [greedy_reference(model, ids, 8, eos_token_id=1) for ids in inputs]


def test_generate_batch_with_a_generation_config(
    model, answers, tokenizer, inputs, generation_config
):
    outputs = model.generate_batch(inputs=inputs, generation_config=generation_config)
    texts = {
        request_id: tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
        for request_id, output in outputs.items()
    }
    assert list(texts) == ["req_0", "req_1", "req_2"]
    assert [output.generated_tokens for output in outputs.values()] == answers


def test_a_manager_in_a_context_with_prompts_of_different_lengths(
    model, tokenizer, generation_config
):
    texts = {}
    with model.continuous_batching_context_manager(generation_config=generation_config) as manager:
        manager.add_request(
            input_ids=tokenizer.encode("Write a detailed history of quantum mechanics."),
            request_id="long",
            max_new_tokens=64,
        )
        manager.add_request(
            input_ids=tokenizer.encode("What's up?"), request_id="short_0", max_new_tokens=4
        )
        manager.add_request(
            input_ids=tokenizer.encode("Name a cat breed."), request_id="short_1", max_new_tokens=4
        )
        for result in manager:
            texts[result.request_id] = tokenizer.decode(
                result.generated_tokens, skip_special_tokens=True
            )
    assert set(texts) == {"long", "short_0", "short_1"}
    assert list(texts)[-1] == "long"


def test_a_manager_with_a_life_cycle_of_its_own(model, answers, inputs, generation_config):
    manager = model.init_continuous_batching(generation_config=generation_config)
    manager.start()
    request_id = manager.add_request(inputs[0])
    assert manager.get_result(request_id).generated_tokens == answers[0]
    manager.stop()
    manager.destroy()


def test_stop_finishes_what_was_added(model, answers, inputs, generation_config):
    manager = model.init_continuous_batching(generation_config=generation_config)
    manager.start()
    ids = manager.add_requests(inputs=inputs)
    manager.stop()
    results = {result.request_id: result for result in iter(manager.get_result, None)}
    assert [results[name].generated_tokens for name in ids] == answers
    manager.destroy()


def test_a_hard_stop_fails_what_is_unfinished(model, inputs, generation_config):
    manager = model.init_continuous_batching(generation_config=generation_config)
    manager.add_requests(inputs=inputs, max_new_tokens=200)
    manager.start()
    manager.stop(hard_stop=True)
    results = list(iter(manager.get_result, None))
    assert {result.status for result in results} == {RequestStatus.FAILED}
    assert all("hard_stop" in result.error for result in results)
    manager.destroy()


def test_a_stopped_manager_can_be_started_again(model, answers, inputs, generation_config):
    manager = model.init_continuous_batching(generation_config=generation_config)
    for _ in range(2):
        manager.start()
        request_id = manager.add_request(inputs[1])
        assert manager.get_result(request_id).generated_tokens == answers[1]
        manager.stop()
    manager.destroy()


def test_add_request_add_requests_and_cancel_request(model, inputs, generation_config):
    with model.continuous_batching_context_manager(generation_config=generation_config) as manager:
        assert manager.add_request(input_ids=inputs[0], request_id="my_request") == "my_request"
        assert manager.add_requests(inputs=inputs) == ["req_0", "req_1", "req_2"]
        manager.cancel_request(request_id="my_request")
        result = manager.get_result(request_id="my_request")
    assert result.status in (RequestStatus.FINISHED, cbgen.RequestStatus.CANCELLED)


def test_sampling_parameters_of_single_requests(model, answers, inputs):
    cb_config = ContinuousBatchingConfig(per_request_processors=True, seed=3)
    generation_config = GenerationConfig(
        max_new_tokens=8, do_sample=True, temperature=0.5, top_k=5, top_p=0.9
    )
    with model.continuous_batching_context_manager(
        generation_config=generation_config, continuous_batching_config=cb_config
    ) as manager:
        manager.add_request(input_ids=inputs[0], request_id="a", temperature=0.9, top_p=0.95)
        manager.add_request(input_ids=inputs[0], request_id="b", temperature=0.1, top_k=1)
        results = {result.request_id: result for result in manager}
    assert results["b"].generated_tokens == answers[0]
    assert results["a"].generated_tokens != results["b"].generated_tokens


def test_get_result_with_and_without_an_id(model, inputs, generation_config):
    with model.continuous_batching_context_manager(generation_config=generation_config) as manager:
        manager.add_requests(inputs=inputs)
        manager.add_request(inputs[0], request_id="my_request")
        assert manager.get_result(request_id="my_request").request_id == "my_request"
        others = {manager.get_result().request_id for _ in inputs}
    assert others == {"req_0", "req_1", "req_2"}


def test_streaming(model, answers, tokenizer, inputs, generation_config):
    text = ""
    with model.continuous_batching_context_manager(generation_config=generation_config) as manager:
        manager.add_request(input_ids=inputs[0], request_id="streamed", streaming=True)
        for chunk in manager.request_id_iter(request_id="streamed"):
            text += tokenizer.decode(chunk.generated_tokens[-1:], skip_special_tokens=True)
            if chunk.status == RequestStatus.FINISHED:
                break
    assert len(chunk.generated_tokens) == 8
    assert chunk.generated_tokens == answers[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_memory_percent": 0.8, "page_size": 256, "scheduler_type": "fifo"},
        {"page_size": 128},
        {"max_batch_tokens": 16384},
        {"max_requests_per_batch": 256},
        {"safety_margin": 0.15},
        {"max_blocks_per_request": 0},
        {"cpu_offload_space": 0.0},
        {"cpu_group_timeout": 600.0},
        {"allow_block_sharing": True},
        {"auto_switch_to_flash": False},
    ],
)
def test_settings_of_the_engine_change_no_answer(model, answers, inputs, generation_config, fields):
    outputs = model.generate_batch(
        inputs=inputs,
        generation_config=generation_config,
        continuous_batching_config=ContinuousBatchingConfig(**fields),
    )
    assert [output.generated_tokens for output in outputs.values()] == answers


def test_log_probabilities(model, inputs, generation_config):
    cb_config = ContinuousBatchingConfig(return_logprobs=True)
    outputs = model.generate_batch(
        inputs=inputs, generation_config=generation_config, continuous_batching_config=cb_config
    )
    for prompt, output in zip(inputs, outputs.values(), strict=True):
        tokens = torch.tensor([prompt + output.generated_tokens])
        with torch.no_grad():
            logprobs = model(tokens).logits[0].log_softmax(-1)
        wanted = [
            float(logprobs[len(prompt) - 1 + place, token])
            for place, token in enumerate(output.generated_tokens)
        ]
        assert output.logprobs == pytest.approx(wanted, abs=1e-4)


def test_a_sliding_window_that_was_set_in_the_config(tmp_path, bound):
    tiny_model("mistral").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.sliding_window = 6
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, config=config, attn_implementation="sdpa"
    )
    bound(type(model))
    prompt = list(range(1, 30))
    outputs = model.generate_batch([prompt], generation_config=GenerationConfig(max_new_tokens=9))
    assert outputs["req_0"].generated_tokens == greedy_reference(model, prompt, 9)


def test_generate_with_the_paged_cache_comes_here(checkpoint, bound, caplog):
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    bound(LlamaForCausalLM)
    prompt = [5, 6, 7]
    tokens = model.generate(
        torch.tensor([prompt]), cache_implementation="paged", max_new_tokens=4, do_sample=False
    )
    assert tokens[0, -1, -4:].tolist() == greedy_reference(model, prompt, 4)
