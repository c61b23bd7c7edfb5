"""Models whose linear layers are int8: what changes, what stays, and what is refused."""

from __future__ import annotations

import copy
import logging
import random

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import cbgen
from cbgen.engine.build import plan_engine
from cbgen.engine.config import ContinuousBatchingConfig, ModelConfig
from cbgen.engine.cpu import int8, native
from cbgen.engine.cpu.decoder import FusedDecoder
from cbgen.engine.cpu.int8 import quantize_for_cpu
from cbgen.engine.cpu.linears import PackedLinear
from cbgen.engine.cpu.native import Kernels
from cbgen.engine.model.loader import load_model
from cbgen.engine.model.probe import probe_model
from cbgen.errors import UsageError
from tests.helpers.models import full_logits, random_model, tiny_config, tiny_model
from tests.helpers.stepping import Stepper
from tests.helpers.tiny_checkpoint import VOCAB_SIZE, save_tiny_checkpoint

MODELS = ("llama", "qwen3", "gpt2", "gemma", "gemma2", "gemma3", "mistral", "gpt_oss")
TOKENS = [5, 90, 3, 17, 64, 1, 127]
LENGTHS = (1, 5, 37, 12)
BATCHING = ContinuousBatchingConfig(num_blocks=32, page_size=16)


def own_model(name: str) -> PreTrainedModel:
    """Return a copy of a tiny model, which may be changed."""
    return copy.deepcopy(tiny_model(name))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("name", MODELS)
def test_logits_stay_near_those_of_the_model(library: Kernels, name):
    model = own_model(name)
    quantize_for_cpu(model)
    wanted = full_logits(tiny_model(name), TOKENS)
    spread = wanted - wanted.mean(dim=-1, keepdim=True)
    assert 1e-4 < float((full_logits(model, TOKENS) - wanted).norm() / spread.norm()) < 0.1


@pytest.mark.parametrize("is_tied", [True, False])
def test_embedding_and_head_keep_every_value(library: Kernels, is_tied):
    config = tiny_config("llama", tie_word_embeddings=is_tied)
    model = random_model(type(tiny_model("llama")), config)
    weights = [
        module.weight.detach().clone()
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
    ]
    quantize_for_cpu(model)
    for module, weight in zip(
        (model.get_input_embeddings(), model.get_output_embeddings()), weights, strict=True
    ):
        assert torch.equal(module.packed.unpack(torch.float32), weight)


def test_all_other_linear_layers_are_int8(library: Kernels):
    model = own_model("llama")
    quantize_for_cpu(model)
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if isinstance(m, PackedLinear) and m is not head]
    assert len(linears) == 2 * 7
    assert all(linear.packed.is_rounded for linear in linears)
    assert not any(isinstance(m, nn.Linear) for m in model.modules())


def test_the_error_of_the_logits_is_logged_once(library: Kernels, caplog):
    with caplog.at_level(logging.INFO):
        quantize_for_cpu(own_model("llama"))
    assert [r.message for r in caplog.records if "int8 moves the logits by" in r.message] != []
    assert len(caplog.records) == 1


def test_a_model_whose_logits_are_lost_is_refused(library: Kernels, monkeypatch):
    monkeypatch.setattr(int8, "_MOST_ERROR", 1e-6)
    with pytest.raises(UsageError, match=r"moves the logits of this model by \d+%.*remove it"):
        quantize_for_cpu(own_model("llama"))


def test_a_model_without_linear_layers_is_refused(library: Kernels, monkeypatch):
    monkeypatch.setattr(int8, "packable_weights", lambda model: [])
    with pytest.raises(UsageError, match="LlamaForCausalLM has no linear layers"):
        quantize_for_cpu(own_model("llama"))


def test_a_token_is_the_same_bits_in_any_steps(int8_kernels: Kernels):
    model = own_model("llama")
    quantize_for_cpu(model)
    assert any(isinstance(module, FusedDecoder) for module in model.modules())
    choose = random.Random(0)
    sequences = [[choose.randrange(model.config.vocab_size) for _ in range(n)] for n in LENGTHS]
    outputs = []
    for seed in range(3):
        stepper = Stepper(model, sequences, attention="cpu", num_blocks=256, seed=seed)
        outputs.append(stepper.run(random.Random(seed), most_tokens=16))
    for output in outputs[1:]:
        assert all(map(torch.equal, output, outputs[0]))


def test_a_recipe_may_ask_for_int8(library: Kernels, folder):
    recipe = {
        "model": {"path": folder, "device": "cpu", "quantization": "int8"},
        "generation_config": {"max_new_tokens": 8},
    }
    rows = [{"id": str(i), "prompt": f"question {i}"} for i in range(6)]
    together = list(cbgen.run(recipe, rows))
    assert [row["id"] for row in together] == [row["id"] for row in rows]
    alone = [row for each in rows for row in cbgen.run(recipe, [each])]
    assert [row["text"] for row in together] == [row["text"] for row in alone]


def test_the_plan_counts_int8_weights(library: Kernels, folder):
    config = ModelConfig(path=folder, device="cpu", quantization="int8")
    planned = plan_engine(config, BATCHING)
    model = load_model(config).model
    padding = 2 * (-VOCAB_SIZE % native.PANEL) * 32 * 4  # of embedding and head, 32 deep
    assert probe_model(model).weight_bytes == planned.facts.weight_bytes + padding


@pytest.mark.parametrize("load", [load_model, lambda config: plan_engine(config, BATCHING)])
def test_without_kernels_int8_is_refused_before_weights_are_read(folder, monkeypatch, load):
    monkeypatch.setattr(native, "why_missing", lambda: "the C++ kernels were not built")
    monkeypatch.setattr("cbgen.engine.model.loader._load_weights", None)
    with pytest.raises(UsageError, match=r"'int8'.*the C\+\+ kernels were not built"):
        load(ModelConfig(path=folder, device="cpu", quantization="int8"))


def test_int8_on_a_gpu_is_refused():
    with pytest.raises(UsageError, match=r"on cuda:0: set model\.device to cpu"):
        int8.check_quantization(torch.device("cuda:0"), torch.float32)


def test_int8_beside_a_16_bit_dtype_is_refused(folder):
    config = ModelConfig(path=folder, device="cpu", dtype="bfloat16", quantization="int8")
    with pytest.raises(UsageError, match=r"set model\.dtype to float32"):
        load_model(config)
