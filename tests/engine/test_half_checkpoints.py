"""A checkpoint of 16 bits that computes in float32 keeps its weights, and answers as if widened."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from cbgen.engine.config import ModelConfig
from cbgen.engine.cpu import native, packing
from cbgen.engine.cpu.linears import packed_bytes
from cbgen.engine.cpu.native import PANEL
from cbgen.engine.cpu.packed import num_panels
from cbgen.engine.cpu.packing import computing_in_float32, widen
from cbgen.engine.model import checkpoint, loader
from cbgen.engine.model.checkpoint import load_unwidened, matrix_dtypes
from cbgen.engine.model.loader import load_model
from cbgen.errors import EngineError
from tests.helpers.models import EAGER_MODELS, HYBRID_MODELS, PLAIN_MODELS, full_logits, tiny_model

pytestmark = pytest.mark.skipif(native.kernels() is None, reason="the kernels are not built")

TOKENS = [3, 1, 4, 1, 5]


@pytest.fixture
def save(tmp_path):
    """Save a tiny model in a dtype and return its folder."""

    def save_in(name: str, dtype: torch.dtype = torch.bfloat16) -> str:
        copy.deepcopy(tiny_model(name)).to(dtype).save_pretrained(tmp_path)
        return str(tmp_path)

    return save_in


def load(folder: str):
    return load_model(ModelConfig(path=folder, device="cpu", dtype="float32")).model


def load_widened(folder: str, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(loader, "matrix_dtypes", lambda name, options: {})
        return load(folder)


def load_unpacked(folder: str):
    config = AutoConfig.from_pretrained(folder)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    return load_unwidened(model_class, folder, config, matrix_dtypes(folder, {}))[0]


@pytest.mark.parametrize("name", [*PLAIN_MODELS, *EAGER_MODELS, *HYBRID_MODELS])
def test_logits_equal_those_of_a_float32_load_exactly(save, name, monkeypatch):
    folder = save(name)
    logits = full_logits(load(folder), TOKENS)
    assert torch.equal(logits, full_logits(load_widened(folder, monkeypatch), TOKENS))


def test_a_float16_checkpoint_is_loaded_exactly_too(save, monkeypatch):
    folder = save("llama", torch.float16)
    logits = full_logits(load(folder), TOKENS)
    assert torch.equal(logits, full_logits(load_widened(folder, monkeypatch), TOKENS))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma", "qwen2_moe"])
def test_linear_layers_and_the_embedding_are_never_widened_and_all_else_is(save, name):
    model = load_unpacked(save(name))
    embedding = model.get_input_embeddings()
    for module in model.modules():
        packable = module is embedding or type(module) in (torch.nn.Linear, Conv1D)
        for part, parameter in module._parameters.items():
            if parameter is not None:
                kept = packable and part == "weight"
                assert parameter.dtype is (torch.bfloat16 if kept else torch.float32)
    assert all(buffer.dtype is not torch.bfloat16 for buffer in model.buffers())


def test_a_loaded_model_is_of_its_own_class(save):
    assert type(load_unpacked(save("llama"))) is type(tiny_model("llama"))


def test_a_packed_checkpoint_takes_16_bits_a_weight(save):
    model = load(save("llama"))
    shapes = [each.shape for each in tiny_model("llama").parameters() if each.dim() == 2]
    panels = sum(num_panels(columns) * depth for columns, depth in shapes)
    assert packed_bytes(model) == 2 * panels * PANEL
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


def test_a_tensor_that_has_32_bits_beside_others_keeps_them(save, monkeypatch):
    folder = save("llama")
    tensors = load_file(f"{folder}/model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = torch.full_like(tensors[name], 1 / 3, dtype=torch.float32)
    save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
    kept = load_unpacked(folder).get_parameter(name)
    assert kept.dtype is torch.float32
    assert torch.equal(kept, tensors[name])


def test_a_bias_of_32_bits_widens_no_matrix(save):
    folder = save("llama")
    tensors = load_file(f"{folder}/model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + 1e-3
    save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
    model = load_unpacked(folder)
    assert model.model.layers[0].mlp.down_proj.weight.dtype is torch.bfloat16
    assert torch.equal(model.model.norm.weight, tensors["model.norm.weight"])


def test_experts_are_stacked_with_16_bits_and_widened_after(save, monkeypatch):
    folder = save("qwen2_moe")
    widened = []

    def spy(model, *, but_packable):
        widened.extend(each.dtype for each in model.parameters() if each.dim() > 2)
        widen(model, but_packable=but_packable)

    monkeypatch.setattr(checkpoint, "widen", spy)
    model = load_unpacked(folder)
    assert set(widened) == {torch.bfloat16}
    assert {each.dtype for each in model.parameters() if each.dim() > 2} == {torch.float32}


def test_the_dtypes_of_all_files_of_a_checkpoint_are_read(tmp_path):
    model = copy.deepcopy(tiny_model("llama")).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    dtypes = matrix_dtypes(str(tmp_path), {})
    matrices = [name for name, value in model.state_dict().items() if value.dim() > 1]
    assert dtypes == dict.fromkeys(matrices, torch.bfloat16)


def test_a_checkpoint_whose_tensors_have_other_names_is_kept_if_all_have_16_bits(tmp_path):
    copy.deepcopy(tiny_model("llama").model).to(torch.bfloat16).save_pretrained(tmp_path)
    tensors = load_file(f"{tmp_path}/model.safetensors")
    tensors["lm_head.weight"] = tiny_model("llama").lm_head.weight.detach().bfloat16()
    save_file(tensors, f"{tmp_path}/model.safetensors", metadata={"format": "pt"})
    assert "layers.0.mlp.down_proj.weight" in tensors  # without the prefix that the model has
    model = load_unpacked(str(tmp_path))
    assert model.model.layers[0].mlp.down_proj.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2"])
def test_the_reference_computes_what_the_widened_model_does(save, name):
    model = load_unpacked(save(name))
    with computing_in_float32(model):
        assert model.dtype is torch.float32
        logits = full_logits(model, TOKENS)
    assert model.dtype is torch.bfloat16
    widen(model)
    wanted = full_logits(model, TOKENS)
    assert (logits - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_the_reference_widens_what_cannot_be_packed(save):
    model = load_unpacked(save("llama"))
    model.model.norm.to(torch.bfloat16)
    with computing_in_float32(model):
        assert full_logits(model, TOKENS).isfinite().all()
    assert model.model.norm.weight.dtype is torch.float32


def test_a_model_that_cannot_be_packed_runs_in_float32(save, monkeypatch, caplog):
    def fail(model, kernels):
        raise EngineError("a layer of shape (3, 4)")

    folder = save("llama")
    monkeypatch.setattr(packing, "pack_linears", fail)
    with caplog.at_level(logging.WARNING):
        model = load(folder)
    assert "linear layers run on torch" in caplog.text
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    assert full_logits(model, TOKENS).isfinite().all()
