"""Models are attached, answer only inside of steps, and are given back as they were."""

from __future__ import annotations

import math
import threading
from contextlib import ExitStack

import pytest
import torch

from cbgen.engine.attention.context import forward_context
from cbgen.engine.forward import run_model
from cbgen.engine.model.attach import HOOK_NAME, attached
from cbgen.errors import UsageError
from tests.helpers.engine import make_request, run_engine, tokens_of
from tests.helpers.models import (
    EAGER_MODELS,
    HYBRID_MODELS,
    PLAIN_MODELS,
    make_engine,
    random_model,
    tiny_config,
    tiny_model,
    tiny_reference,
)

PROMPT = (3, 50, 7, 91, 22)


def answer_of(built, num_new: int = 12) -> list[int]:
    request = make_request("a", PROMPT, max_new_tokens=num_new)
    return tokens_of(run_engine(built.engine, [request]))["a"]


@pytest.mark.parametrize("name", PLAIN_MODELS + EAGER_MODELS + HYBRID_MODELS)
def test_a_model_is_given_back_as_it_was(name):
    model = tiny_model(name)
    before = model.config._attn_implementation
    with make_engine(name, page_size=16, num_blocks=8):
        assert model.config._attn_implementation == HOOK_NAME
    assert model.config._attn_implementation == before


def test_a_model_is_given_back_after_an_error():
    model = tiny_model("llama")
    before = model.config._attn_implementation
    with pytest.raises(KeyError, match="planted"), make_engine("llama", num_blocks=8):
        raise KeyError("planted")
    assert model.config._attn_implementation == before


def test_a_model_is_given_back_when_the_plan_is_refused():
    model = tiny_model("gemma2")
    before = model.config._attn_implementation
    with pytest.raises(UsageError, match="softcap"), make_engine("gemma2", "sdpa"):
        pass
    assert model.config._attn_implementation == before


def test_a_model_with_eager_attention_is_given_back_with_it():
    model = random_model(type(tiny_model("llama")), tiny_config("llama"))
    model.set_attn_implementation("eager")
    with attached(model):
        pass
    assert model.config._attn_implementation == "eager"


def test_generate_answers_the_same_before_and_after():
    model = tiny_model("qwen3")
    inputs = torch.tensor([PROMPT])
    before = model.generate(inputs, max_new_tokens=5, do_sample=False, pad_token_id=0)
    with make_engine("qwen3", num_blocks=8) as built:
        answer_of(built)
    after = model.generate(inputs, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(before, after)


def test_weights_and_training_mode_are_not_touched():
    model = tiny_model("llama")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with make_engine("llama", num_blocks=8) as built:
        answer_of(built)
    assert not model.training
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_an_attached_model_called_outside_of_a_step_says_so():
    with (
        attached(tiny_model("llama")),
        pytest.raises(RuntimeError, match=r"called outside of a step; stop the manager"),
    ):
        tiny_model("llama")(torch.tensor([[1, 2]]))


def test_a_model_may_be_attached_again():
    answers = []
    for _ in range(2):
        with make_engine("gpt2", page_size=16, num_blocks=8) as built:
            answers.append(answer_of(built))
    assert answers[0] == answers[1] == tiny_reference("gpt2", PROMPT, 12)


class Queries:
    """Answers attention layers with zeros and keeps their queries: layer -> [T, heads, dim]."""

    def __init__(self, positions: list[int]) -> None:
        self.positions = torch.tensor(positions)
        self.found: dict[int, torch.Tensor] = {}

    def attend(self, layer_index, query, key, value, layer):
        self.found[layer_index] = query
        return torch.zeros_like(query)


def llama4_queries(token_ids: list[int], positions: list[int]) -> dict[int, torch.Tensor]:
    model, queries = tiny_model("llama4"), Queries(positions)
    ends = torch.tensor([len(positions) - 1])
    with attached(model), forward_context(queries), torch.inference_mode():
        run_model(model, torch.tensor([token_ids]), queries.positions[None], ends)
    return queries.found


def test_llama4_scales_queries_by_their_positions_and_not_by_their_place_in_the_step():
    token_ids = [3, 50, 7, 91, 22, 9, 4, 8, 1, 2]
    whole = llama4_queries(token_ids * 3, list(range(30)))
    packed = llama4_queries([5, 6, *token_ids * 2], [0, 1, *range(10, 30)])
    for layer, queries in packed.items():
        torch.testing.assert_close(queries[2:], whole[layer][10:], rtol=1e-5, atol=1e-5)


def test_llama4_scales_the_queries_of_layers_without_rotary_positions_alone():
    """Tokens 9 and 19 are the same, and without attention nothing but the position differs."""
    queries = llama4_queries([3, 50, 7, 91, 22, 9, 4, 8, 1, 2] * 2, list(range(20)))
    model = tiny_model("llama4")
    assert model.config.no_rope_layers == [1, 1, 1, 0]
    scale = (1 + 0.5 * math.log(1 + 20 // 8)) / (1 + 0.5 * math.log(1 + 10 // 8))
    torch.testing.assert_close(queries[3][19], queries[3][9] * scale)
    torch.testing.assert_close(queries[0][19].norm(), queries[0][9].norm())


def test_llama4_scales_its_own_queries_again_when_it_is_given_back():
    model = tiny_model("llama4")
    layers = [layer.self_attn for layer in model.model.layers]
    with attached(model):
        with attached(model):
            assert not any(layer.attn_temperature_tuning for layer in layers)
        assert not any(layer.attn_temperature_tuning for layer in layers)
    assert all(layer.attn_temperature_tuning for layer in layers)


def test_two_engines_on_two_threads_do_not_mix():
    names = ("llama", "gpt2")
    wanted = {name: tiny_reference(name, PROMPT, 40) for name in names}
    got: dict[str, list[list[int]]] = {name: [] for name in names}
    together = threading.Barrier(len(names))

    def work(name: str) -> None:
        with make_engine(name, page_size=4, num_blocks=32) as built:
            together.wait()
            got[name] = [answer_of(built, 40) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {name: [wanted[name]] * 3 for name in names}


@pytest.mark.parametrize("first_to_leave", [0, 1])
def test_two_engines_on_one_model_may_end_in_any_order(first_to_leave):
    model = random_model(type(tiny_model("llama")), tiny_config("llama"))
    before = model.config._attn_implementation
    wanted = tiny_reference("llama", PROMPT, 12)
    stacks = [ExitStack(), ExitStack()]
    engines = [
        stack.enter_context(make_engine(model, page_size=16, num_blocks=8)) for stack in stacks
    ]
    stacks[first_to_leave].close()
    with stacks[1 - first_to_leave]:
        assert answer_of(engines[1 - first_to_leave]) == wanted
    assert model.config._attn_implementation == before
