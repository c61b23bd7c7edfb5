"""Decoder layers in one call: the logits of the model, in any batch, on every instruction set."""

from __future__ import annotations

import copy
import logging
import random
from itertools import accumulate

import pytest
import torch
from transformers import PreTrainedModel

from cbgen.engine.cpu.decoder import FusedDecoder
from cbgen.engine.cpu.fusing import fuse_decoder
from cbgen.engine.cpu.linears import pack_linears
from cbgen.engine.cpu.native import PARTS, Kernels
from tests.helpers.models import random_model, tiny_config, tiny_model
from tests.helpers.stepping import Stepper

FUSED_MODELS = ("llama", "qwen3", "mistral", "qwen2_sliding", "smollm3")
OTHER_MODELS = ("gpt2", "gemma3", "qwen2_moe", "gpt_oss")
LENGTHS = (1, 5, 37, 12)
TOLERANCE = 1e-5
"""Difference from float64 as a share of the largest logit; torch in float32 differs as much."""


def fused_model(name: str, kernels: Kernels, **changes: object) -> PreTrainedModel:
    """Return a tiny model whose decoder layers run as one."""
    model = random_model(type(tiny_model(name)), tiny_config(name, **changes))
    pack_linears(model, kernels)
    assert fuse_decoder(model, kernels)
    return model


def sequences(model: PreTrainedModel) -> list[list[int]]:
    choose = random.Random(0)
    return [[choose.randrange(model.config.vocab_size) for _ in range(n)] for n in LENGTHS]


def logits_by_steps(model: PreTrainedModel, seed: int, page_size: int = 4) -> list[torch.Tensor]:
    """Run some sequences through a fused model in random pieces; return the logits of each."""
    stepper = Stepper(
        model, sequences(model), attention="cpu", page_size=page_size, num_blocks=256, seed=seed
    )
    return stepper.run(random.Random(seed), most_tokens=16)


@torch.inference_mode()
def plain_logits(model: PreTrainedModel) -> list[torch.Tensor]:
    exact = copy.deepcopy(model).double()
    return [exact(torch.tensor([ids])).logits[0] for ids in sequences(model)]


def fused(model: PreTrainedModel) -> FusedDecoder:
    (found,) = (module for module in model.modules() if isinstance(module, FusedDecoder))
    return found


@pytest.mark.parametrize("name", FUSED_MODELS)
def test_fused_layers_compute_the_logits_of_the_model(kernels: Kernels, name):
    wanted = plain_logits(tiny_model(name))
    for found, expected in zip(logits_by_steps(fused_model(name, kernels), 1), wanted, strict=True):
        assert float((found - expected).abs().max() / expected.abs().max()) < TOLERANCE


@pytest.mark.parametrize("name", FUSED_MODELS)
def test_logits_are_the_same_bits_in_any_batch_chunk_and_page(kernels: Kernels, name):
    model = fused_model(name, kernels)
    first = logits_by_steps(model, 1)
    for seed, page_size in ((2, 4), (3, 16), (4, 1)):
        for one, other in zip(first, logits_by_steps(model, seed, page_size), strict=True):
            assert torch.equal(one, other)


def test_logits_are_the_same_bits_on_any_number_of_threads(library: Kernels, threads):
    model = fused_model("qwen3", library, hidden_size=160, intermediate_size=416)
    torch.set_num_threads(1)
    alone = logits_by_steps(model, 1)
    torch.set_num_threads(3)
    assert all(map(torch.equal, alone, logits_by_steps(model, 1)))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
@pytest.mark.parametrize("most_logits", [None, 3])
def test_many_rows_are_the_same_bits_as_few(library: Kernels, threads, num_threads, most_logits):
    torch.set_num_threads(num_threads)
    choose = random.Random(1)
    model = fused_model("llama", library, max_position_embeddings=512)
    long = [[choose.randrange(1, model.config.vocab_size) for _ in range(n)] for n in (333, 140)]

    def run(most_tokens: int) -> list[torch.Tensor]:
        stepper = Stepper(
            *(model, long),
            attention="cpu",
            page_size=16,
            num_blocks=64,
            most_logits=most_logits,
        )
        parts: list[list[torch.Tensor]] = [[], []]
        for begin in range(0, max(map(len, long)), most_tokens):
            counts = {
                row: min(most_tokens, len(ids) - begin)
                for row, ids in enumerate(long)
                if begin < len(ids)
            }
            for row, logits in stepper.step(counts).items():
                parts[row].append(logits)
        return [torch.cat(part)[-3:] for part in parts]

    # All in one step, where each thread does some of the rows alone, or some tokens a step.
    assert all(map(torch.equal, run(most_tokens=400), run(most_tokens=20)))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"hidden_size": 48, "head_dim": 10, "num_attention_heads": 6, "num_key_value_heads": 3},
        {"hidden_size": 44, "intermediate_size": 71, "head_dim": 34},
        {"num_key_value_heads": 1},
    ],
    ids=["biases", "small heads", "odd sizes", "one key head"],
)
def test_layers_of_any_size_are_fused(kernels: Kernels, changes):
    model = fused_model("llama", kernels, **changes)
    with torch.no_grad():
        wanted = plain_logits(
            random_model(type(tiny_model("llama")), tiny_config("llama", **changes))
        )
    for found, expected in zip(logits_by_steps(model, 1), wanted, strict=True):
        assert float((found - expected).abs().max() / expected.abs().max()) < TOLERANCE


def test_long_steps_are_worked_on_in_blocks_of_rows(library: Kernels):
    model = fused_model("llama", library)
    choose = random.Random(1)
    tokens = [choose.randrange(100) for _ in range(500)]
    whole = Stepper(model, [tokens], attention="cpu", page_size=16).step({0: 500})[0]
    stepper = Stepper(model, [tokens], attention="cpu", page_size=16)
    parts = [stepper.step({0: count})[0] for count in (191, 193, 1, 115)]
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_other_models_keep_their_layers(library: Kernels, name):
    model = copy.deepcopy(tiny_model(name))
    pack_linears(model, library)
    before = list(model.modules())
    assert not fuse_decoder(model, library)
    assert list(model.modules()) == before


@pytest.mark.parametrize(
    "place", ["", "model", "model.rotary_emb", "model.norm", "model.layers.1", "model.layers.1.mlp"]
)
def test_a_model_with_a_class_of_somebody_else_keeps_its_layers(library: Kernels, place):
    model = copy.deepcopy(tiny_model("llama"))
    pack_linears(model, library)
    module = model.get_submodule(place)
    # By the same name: it may compute anything.
    own = type(type(module).__name__, (type(module),), {"__module__": "elsewhere"})
    module.__class__ = own
    assert not fuse_decoder(model, library)


def test_a_last_norm_of_another_epsilon_keeps_a_models_layers(library: Kernels):
    model = copy.deepcopy(tiny_model("llama"))
    pack_linears(model, library)
    model.model.norm.variance_epsilon *= 2
    assert not fuse_decoder(model, library)


def test_layers_that_do_not_agree_are_put_back_and_that_is_logged(library: Kernels, caplog):
    model = copy.deepcopy(tiny_model("llama"))
    pack_linears(model, library)
    layers = model.model.layers
    mlp = layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda rows: 1.01 * forward(rows)
    with caplog.at_level(logging.WARNING):
        assert not fuse_decoder(model, library)
    assert model.model.layers is layers
    assert "fused, they change a logit" in caplog.text


def test_other_backends_attend_in_the_layers_own_way(library: Kernels):
    model = fused_model("llama", library)
    fused(model).take_seconds()
    stepper = Stepper(model, sequences(model), attention="eager")
    found = stepper.run(random.Random(1), most_tokens=16)
    assert not any(fused(model).take_seconds().values())
    for one, other in zip(found, logits_by_steps(model, 1), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_time_of_each_part_is_counted_once(library: Kernels):
    model = fused_model("llama", library)
    fused(model).take_seconds()
    logits_by_steps(model, 1)
    screen = fused(model).screen
    assert screen is not None
    screen.best(torch.randn(2, model.config.hidden_size))
    seconds = fused(model).take_seconds()
    assert tuple(seconds) == (*PARTS, "head")
    assert all(value > 0 for value in seconds.values())
    assert not any(fused(model).take_seconds().values())


def test_two_engines_may_use_one_fused_model_in_turns(library: Kernels):
    model = fused_model("llama", library)
    wanted = logits_by_steps(model, 1)
    steppers = [Stepper(model, sequences(model), attention="cpu", seed=seed) for seed in (1, 2)]
    parts: list[list[list[torch.Tensor]]] = [[[] for _ in LENGTHS] for _ in steppers]
    for start in accumulate([0, *[4] * 10]):
        for stepper, rows in zip(steppers, parts, strict=True):
            counts = {
                row: min(4, length - start) for row, length in enumerate(LENGTHS) if length > start
            }
            if counts:
                for row, logits in stepper.step(counts).items():
                    rows[row].append(logits)
    for rows in parts:
        assert all(
            torch.equal(torch.cat(row), logits) for row, logits in zip(rows, wanted, strict=True)
        )


@pytest.mark.parametrize("name", FUSED_MODELS)
def test_the_last_layer_answers_the_tokens_whose_logits_are_wanted(kernels: Kernels, name):
    model = fused_model(name, kernels)
    wanted = logits_by_steps(model, 1)
    stepper = Stepper(model, sequences(model), attention="cpu", most_logits=1)
    for start in range(0, max(LENGTHS), 9):
        counts = {
            row: min(9, length - start) for row, length in enumerate(LENGTHS) if length > start
        }
        for row, logits in stepper.step(counts).items():
            assert torch.equal(logits, wanted[row][start + counts[row] - 1][None])


def test_a_step_without_logits_writes_keys_and_values_all_the_same(library: Kernels):
    model = fused_model("llama", library)
    wanted = logits_by_steps(model, 1)
    stepper = Stepper(model, sequences(model), attention="cpu", most_logits=0)
    stepper.step({2: 30})
    stepper.most_logits = None
    assert torch.equal(stepper.step({2: 7})[2], wanted[2][30:])
