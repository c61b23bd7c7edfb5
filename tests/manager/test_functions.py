"""generate_batch and its siblings on a loaded model: what they honour, refuse, and leave alone."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
import transformers.generation as reference
from transformers import GenerationConfig, LlamaForCausalLM

import cbgen
from cbgen.errors import UsageError
from tests.helpers.managers import failing_at, scripted_manager
from tests.helpers.models import (
    CONTEXT,
    random_model,
    tiny_config,
    tiny_model,
    tiny_reference,
)

PROMPT = (3, 1, 4, 1, 5)
PROMPTS = (PROMPT, (9, 2), (6, 5, 3, 5, 8, 9, 7))


def llama(**config) -> LlamaForCausalLM:
    """Return a tiny model of its own, with the weights of the shared one."""
    return random_model(LlamaForCausalLM, tiny_config("llama", **config))


def test_outputs_are_those_of_generate_in_the_order_of_the_prompts():
    outputs = cbgen.generate_batch(tiny_model("llama"), PROMPTS, max_new_tokens=7)
    assert {name: output.generated_tokens for name, output in outputs.items()} == {
        f"req_{place}": tiny_reference("llama", prompt, 7) for place, prompt in enumerate(PROMPTS)
    }


def test_a_repetition_penalty_counts_from_keyword_config_and_the_models_own():
    model = llama()
    plain = tiny_reference("llama", PROMPT, 12)
    penalized = tiny_reference("llama", PROMPT, 12, repetition_penalty=1.4)
    assert penalized != plain

    def answer(config=None, **sampling) -> list[int]:
        outputs = cbgen.generate_batch(model, [PROMPT], config, max_new_tokens=12, **sampling)
        return outputs["req_0"].generated_tokens

    assert answer(repetition_penalty=1.4) == penalized
    assert answer(GenerationConfig(repetition_penalty=1.4)) == penalized
    model.generation_config.repetition_penalty = 1.4
    assert answer() == penalized
    assert answer(repetition_penalty=1.0) == plain


def test_no_prompts_give_no_outputs():
    assert cbgen.generate_batch(tiny_model("llama"), []) == {}


@pytest.mark.parametrize("make", [tuple, np.array, torch.tensor])
def test_a_prompt_may_be_any_sequence_of_integers(make):
    outputs = cbgen.generate_batch(tiny_model("llama"), [make(PROMPT)], max_new_tokens=4)
    assert outputs["req_0"].generated_tokens == tiny_reference("llama", PROMPT, 4)


def test_a_prompt_of_text_is_a_type_error():
    with pytest.raises(TypeError, match="flat list of token ids"):
        cbgen.generate_batch(tiny_model("llama"), ["text"])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_model_is_given_back_as_it_was(implementation):
    model = llama()
    model.set_attn_implementation(implementation)
    model.train()
    model.model.layers[0].eval()
    modules, config = list(model.modules()), model.config.to_dict()
    training = [module.training for module in modules]
    generation = copy.deepcopy(model.generation_config)
    attributes = set(model.__dict__)
    cbgen.generate_batch(model, PROMPTS, max_new_tokens=2)
    assert model.config._attn_implementation == implementation
    assert model.config.to_dict() == config
    assert model.generation_config == generation
    assert [module.training for module in modules] == training
    assert list(model.modules()) == modules
    assert set(model.__dict__) == attributes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def raise_in_a_context(model, error: BaseException) -> None:
    with cbgen.continuous_batching_context_manager(model) as manager:
        manager.add_request(PROMPT)
        raise error


def test_the_model_is_given_back_after_an_error():
    model = llama().train()
    with pytest.raises(ZeroDivisionError):
        raise_in_a_context(model, ZeroDivisionError())
    assert (model.config._attn_implementation, model.training) == ("sdpa", True)


def test_a_model_in_training_mode_answers_as_in_evaluation_mode():
    model = llama(attention_dropout=0.5).train()
    outputs = cbgen.generate_batch(model, [PROMPT], max_new_tokens=6)
    assert outputs["req_0"].generated_tokens == tiny_reference("llama", PROMPT, 6)


def test_the_callers_random_state_and_configs_are_left_alone():
    config = GenerationConfig(do_sample=True, max_new_tokens=5, eos_token_id=None)
    before = copy.deepcopy(config)
    batching = reference.ContinuousBatchingConfig(seed=4)
    batching_before = copy.deepcopy(batching)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].tolist()
    cbgen.generate_batch(tiny_model("llama"), PROMPTS, config, batching)
    cbgen.generate_batch(tiny_model("llama"), PROMPTS, config)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.random.get_state()[1].tolist() == numpy_state
    assert vars(config) == vars(before)
    assert batching == batching_before


@pytest.mark.parametrize("eos", [35, [35, 999]])
def test_an_answer_ends_with_an_end_of_sequence(eos):
    full = tiny_reference("llama", (1, 2, 3), 8)
    assert full.index(35) == 2
    config = GenerationConfig(max_new_tokens=8, eos_token_id=eos)
    output = cbgen.generate_batch(tiny_model("llama"), [[1, 2, 3]], config)["req_0"]
    assert output.generated_tokens == full[:3]
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("place", ["config", "generation_config"])
def test_the_models_own_end_of_sequence_counts_where_the_config_has_none(place):
    model = llama()
    getattr(model, place).eos_token_id = 35
    config = GenerationConfig(max_new_tokens=8)
    output = cbgen.generate_batch(model, [[1, 2, 3]], config)["req_0"]
    assert output.generated_tokens == tiny_reference("llama", (1, 2, 3), 8)[:3]
    assert config.eos_token_id is None


def test_an_end_of_sequence_below_zero_means_none():
    model = llama(eos_token_id=35)
    config = GenerationConfig(max_new_tokens=8, eos_token_id=-1)
    output = cbgen.generate_batch(model, [[1, 2, 3]], config)["req_0"]
    assert output.generated_tokens == tiny_reference("llama", (1, 2, 3), 8)


def test_without_a_generation_config_the_models_own_counts():
    model = llama()
    model.generation_config = GenerationConfig(max_new_tokens=3)
    assert len(cbgen.generate_batch(model, [PROMPT])["req_0"].generated_tokens) == 3


def test_a_generation_config_is_not_mixed_with_the_models_own():
    model = llama()
    model.generation_config = GenerationConfig(do_sample=True, temperature=5.0, max_new_tokens=3)
    output = cbgen.generate_batch(model, [PROMPT], GenerationConfig(max_new_tokens=6))["req_0"]
    assert output.generated_tokens == tiny_reference("llama", PROMPT, 6)


def test_max_length_bounds_prompt_and_answer_together():
    outputs = cbgen.generate_batch(
        tiny_model("llama"), [PROMPT, PROMPT * 3], GenerationConfig(max_length=9)
    )
    assert len(outputs["req_0"].generated_tokens) == 4
    assert outputs["req_1"].error_code == "prompt_too_long"


def test_an_answer_without_any_bound_ends_with_the_context():
    output = cbgen.generate_batch(tiny_model("llama"), [PROMPT], GenerationConfig())["req_0"]
    assert len(PROMPT) + len(output.generated_tokens) == CONTEXT
    assert output.finish_reason == "length"


def test_keywords_win_over_the_generation_config():
    outputs = cbgen.generate_batch(
        tiny_model("llama"), [PROMPT], GenerationConfig(max_new_tokens=9), max_new_tokens=2
    )
    assert len(outputs["req_0"].generated_tokens) == 2


def test_an_unknown_keyword_is_a_type_error_with_the_nearest_name():
    with pytest.raises(TypeError, match=r"'temperatur' .*did you mean temperature\?"):
        cbgen.generate_batch(tiny_model("llama"), [PROMPT], temperatur=0.3)


def test_a_bad_keyword_of_the_whole_call_is_refused():
    with pytest.raises(cbgen.UsageError, match="top_p must be above 0 and at most 1, got 2"):
        cbgen.generate_batch(tiny_model("llama"), [PROMPT], top_p=2.0)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"num_beams": 4}, "num_beams"),
        ({"watermarking_config": {"greenlist_ratio": 0.3}}, "watermarking_config"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
        ({"max_new_tokens": 5, "no_such_field": 1}, "no_such_field"),
    ],
)
def test_a_generation_config_that_asks_for_more_is_refused_by_name(fields, name):
    with pytest.raises(cbgen.UsageError, match=f"generation_config: {name}"):
        cbgen.generate_batch(tiny_model("llama"), [PROMPT], GenerationConfig(**fields))


def test_a_models_own_config_that_asks_for_more_is_refused_by_name():
    model = llama()
    model.generation_config = GenerationConfig(num_beams=3)
    with pytest.raises(cbgen.UsageError, match="the model's generation_config: num_beams"):
        cbgen.generate_batch(model, [PROMPT])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (reference.ContinuousBatchingConfig(page_size=3), "page_size must be at least 4, got 3"),
        ({"page_size": 3}, "page_size must be at least 4, got 3"),
        ({"pagesize": 16}, "no field 'pagesize'; did you mean page_size?"),
        ({"safety_margin": 1.5}, "safety_margin must be between 0 and 1, got 1.5"),
        ({"max_requests_per_batch": 0}, "max_requests_per_batch must be at least 1"),
        (reference.ContinuousBatchingConfig(scheduler_type="lifo"), "scheduler_type is 'lifo'"),
        (reference.ContinuousBatchingConfig(default_compile_level=1), "default_compile_level"),
        (reference.ContinuousBatchingConfig(use_async_batching=True), "use_async_batching"),
        ("fast", "must be a ContinuousBatchingConfig or a mapping, got str"),
    ],
)
def test_a_batching_config_that_cannot_be_had_is_refused_by_name(given, words):
    with pytest.raises(cbgen.UsageError, match=words.replace("?", r"\?")):
        cbgen.init_continuous_batching(tiny_model("llama"), continuous_batching_config=given)


@pytest.mark.parametrize("kind", [cbgen.ContinuousBatchingConfig, dict])
def test_a_batching_config_may_be_of_several_kinds(kind):
    outputs = cbgen.generate_batch(
        tiny_model("llama"),
        [PROMPT],
        GenerationConfig(max_new_tokens=5),
        kind(page_size=4, return_logprobs=True, max_batch_tokens=8),
    )
    assert outputs["req_0"].generated_tokens == tiny_reference("llama", PROMPT, 5)
    assert len(outputs["req_0"].logprobs) == 5


def test_a_batching_config_inside_of_a_generation_config_counts_with_a_warning():
    with pytest.warns(FutureWarning):
        config = GenerationConfig(
            max_new_tokens=5,
            continuous_batching_config=reference.ContinuousBatchingConfig(return_logprobs=True),
        )
    with pytest.warns(FutureWarning, match="pass it as the argument continuous_batching_config"):
        outputs = cbgen.generate_batch(tiny_model("llama"), [PROMPT], config)
    assert len(outputs["req_0"].logprobs) == 5


def test_workload_hints_may_be_those_of_transformers():
    from transformers.generation.continuous_batching.utils import WorkloadHints

    for hints in (WorkloadHints(max_prompt_length=5, num_requests=1), cbgen.WorkloadHints()):
        manager = cbgen.init_continuous_batching(tiny_model("llama"), workload_hints=hints)
        manager.destroy()


def test_two_different_seeds_are_refused():
    config = GenerationConfig(do_sample=True, seed=1)
    with pytest.raises(cbgen.UsageError, match=r"seed = 1 contradicts .*seed = 2"):
        cbgen.generate_batch(tiny_model("llama"), [PROMPT], config, {"seed": 2})


def sampled(prompts, *, seed: int | None = 5, **options) -> list[list[int]]:
    config = GenerationConfig(do_sample=True, temperature=2.0, max_new_tokens=12)
    outputs = cbgen.generate_batch(tiny_model("llama"), prompts, config, {"seed": seed} | options)
    return [output.generated_tokens for output in outputs.values()]


def test_a_seed_makes_answers_that_do_not_depend_on_the_batch():
    together = sampled(PROMPTS)
    assert sampled(PROMPTS, max_batch_tokens=4, page_size=4) == together
    assert sampled(PROMPTS[:1]) == together[:1]
    assert sampled(PROMPTS, seed=6) != together


def test_without_a_seed_every_call_samples_anew():
    assert sampled(PROMPTS, seed=None) != sampled(PROMPTS, seed=None)


def test_samples_of_a_request_follow_it_in_order():
    config = GenerationConfig(do_sample=True, temperature=2.0, max_new_tokens=9)
    config.num_return_sequences = 3
    outputs = cbgen.generate_batch(tiny_model("llama"), PROMPTS[:2], config, {"seed": 1})
    assert list(outputs) == [
        "req_0",
        "req_0__child#0",
        "req_0__child#1",
        "req_1",
        "req_1__child#0",
        "req_1__child#1",
    ]
    assert len({tuple(output.generated_tokens) for output in outputs.values()}) == 6
    config.num_return_sequences = 1
    alone = cbgen.generate_batch(tiny_model("llama"), PROMPTS[:2], config, {"seed": 1})
    assert alone["req_1"].generated_tokens == outputs["req_1"].generated_tokens


def test_a_wrong_request_of_several_samples_is_answered_once():
    config = GenerationConfig(do_sample=True, num_return_sequences=2, max_length=6)
    outputs = cbgen.generate_batch(tiny_model("llama"), [PROMPT * 2, PROMPT], config)
    assert list(outputs) == ["req_0", "req_1", "req_1__child#0"]
    assert outputs["req_0"].error_code == "prompt_too_long"


def test_log_probabilities_may_be_those_after_temperature_and_filters():
    config = GenerationConfig(do_sample=True, top_k=1, max_new_tokens=4)
    batching = {"return_logprobs": True}
    model = tiny_model("llama")
    raw = cbgen.generate_batch(model, [PROMPT], config, batching)["req_0"]
    processed = cbgen.generate_batch(model, [PROMPT], config, batching, logprobs_mode="processed")[
        "req_0"
    ]
    assert processed.logprobs == [0.0] * 4
    assert all(value < 0 for value in raw.logprobs)


def test_a_progress_bar_goes_to_stderr_alone(capsys):
    cbgen.generate_batch(tiny_model("llama"), PROMPTS, max_new_tokens=2, progress_bar=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "3/3" in captured.err


def test_one_wrong_prompt_fails_alone():
    prompts = [PROMPT, [], [10_000], [3] * (CONTEXT + 1), PROMPT]
    outputs = list(cbgen.generate_batch(tiny_model("llama"), prompts, max_new_tokens=4).values())
    assert [output.error_code for output in outputs] == [
        None,
        "empty_prompt",
        "token_out_of_vocabulary",
        "prompt_too_long",
        None,
    ]
    assert outputs[0].generated_tokens == outputs[4].generated_tokens
    assert outputs[4].generated_tokens == tiny_reference("llama", PROMPT, 4)


def test_a_model_that_is_not_supported_is_refused_and_given_back():
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(
        MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, state_size=2)
    ).train()
    with pytest.raises(cbgen.UsageError, match="'mamba' is not supported"):
        cbgen.generate_batch(model, [[1]])
    assert model.training


def test_functions_can_be_put_on_a_model_class(monkeypatch):
    method = functools.partialmethod(cbgen.generate_batch)
    monkeypatch.setattr(LlamaForCausalLM, "generate_batch", method)
    outputs = tiny_model("llama").generate_batch([PROMPT], max_new_tokens=3)
    assert outputs["req_0"].generated_tokens == tiny_reference("llama", PROMPT, 3)


def test_a_dead_engine_raises_its_cause_and_hands_over_what_was_finished(monkeypatch):
    from tests.helpers.scripted import ScriptedModel

    cause = ValueError("broken weights")
    scripted = scripted_manager(monkeypatch, ScriptedModel(before_step=failing_at(3, cause)))
    scripted.destroy()
    model = tiny_model("llama")
    with pytest.raises(cbgen.EngineDied, match="broken weights") as caught:
        cbgen.generate_batch(
            model, [[1], [2], [3]], GenerationConfig(max_new_tokens=9, eos_token_id=2)
        )
    assert caught.value.__cause__ is cause
    assert {name: out.generated_tokens for name, out in caught.value.outputs.items()} == {
        "req_0": [2]
    }
    assert model.config._attn_implementation == "sdpa"


def test_the_old_name_of_the_page_size_is_taken_with_a_warning():
    model = tiny_model("llama")
    settings = {"block_size": 16, "num_blocks": 8}
    with pytest.warns(FutureWarning, match="block_size is deprecated; use page_size"):
        outputs = cbgen.generate_batch(
            model, [[1, 2]], GenerationConfig(max_new_tokens=2), continuous_batching_config=settings
        )
    assert [len(output.generated_tokens) for output in outputs.values()] == [2]


def test_two_names_of_the_page_size_that_disagree_are_refused():
    with pytest.raises(UsageError, match="asks for 16, but page_size is 32; keep one"):
        cbgen.generate_batch(
            tiny_model("llama"),
            [[1, 2]],
            GenerationConfig(max_new_tokens=2),
            continuous_batching_config={"block_size": 16, "page_size": 32},
        )
