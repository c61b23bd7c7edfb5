"""Models whose linear layers and embeddings were packed answer as before, and can be put back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import Gemma3ForCausalLM, PreTrainedModel

from cbgen.engine.cpu.linears import (
    FusedLinear,
    FusedProduct,
    PackedEmbedding,
    PackedLinear,
    Stash,
    pack_linears,
    packed_bytes,
    unpack_linears,
)
from cbgen.engine.cpu.native import Kernels
from cbgen.engine.cpu.packed import PackedWeight
from cbgen.errors import EngineError
from tests.helpers.models import VOCAB_SIZE, random_model, tiny_config, tiny_model

MODELS = ("llama", "qwen3", "gpt2", "gemma", "gemma2", "gemma3", "mistral", "gpt_oss")
TOKEN_IDS = torch.tensor([[5, 90, 3, 17, 64, 1, 127]])


def own_model(name: str) -> PreTrainedModel:
    """Return a copy of a tiny model, which may be changed."""
    return copy.deepcopy(tiny_model(name))


@torch.inference_mode()
def logits_of(model: PreTrainedModel) -> torch.Tensor:
    logits: torch.Tensor = model(TOKEN_IDS, use_cache=False).logits
    return logits


def assert_close(logits: torch.Tensor, wanted: torch.Tensor) -> None:
    difference = (logits - wanted).detach().abs().max()
    assert float(difference / wanted.detach().abs().max()) < 2e-6


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_model_computes_the_same_logits(kernels: Kernels, name):
    model = own_model(name)
    wanted = logits_of(model)
    pack_linears(model, kernels)
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    assert_close(logits_of(model), wanted)


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_model_is_given_back_bit_for_bit(library: Kernels, name):
    model = own_model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    pack_linears(model, library)
    unpack_linears(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_no_weight_is_held_beside_its_packed_form(library: Kernels, name):
    model = own_model(name)
    pack_linears(model, library)
    assert all(parameter.dim() < 2 for parameter in model.parameters())


def test_a_tied_head_and_the_embedding_share_one_packed_weight(library: Kernels):
    model = random_model(type(tiny_model("llama")), tiny_config("llama", tie_word_embeddings=True))
    wanted = logits_of(model)
    untied = own_model("llama")
    for each in (model, untied):
        pack_linears(each, library)
    assert model.get_input_embeddings().packed is model.get_output_embeddings().packed
    assert packed_bytes(model) == packed_bytes(untied) - VOCAB_SIZE * 32 * 4
    assert_close(logits_of(model), wanted)
    unpack_linears(model)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_an_embedding_that_scales_its_rows_is_packed_and_scales(library: Kernels):
    config = tiny_config("gemma3", tie_word_embeddings=True)
    model = random_model(Gemma3ForCausalLM, config)
    wanted = logits_of(model)
    pack_linears(model, library)
    assert isinstance(model.get_input_embeddings(), PackedEmbedding)
    assert_close(logits_of(model), wanted)


def test_weights_of_a_bfloat16_model_are_multiplied_with_float32_rows(library: Kernels):
    wanted = logits_of(own_model("llama").bfloat16().float())
    model = own_model("llama").bfloat16()
    pack_linears(model, library)
    assert_close(logits_of(model.float()), wanted)


def test_queries_keys_and_values_are_one_product(library: Kernels):
    model = own_model("llama")
    pack_linears(model, library)
    logits_of(model)
    fused = [module for module in model.modules() if isinstance(module, FusedLinear)]
    assert len(fused) == 2 * 5
    assert all(module.product.is_fused for module in fused)


def test_the_last_part_of_a_fused_product_drops_its_result(library: Kernels):
    model = own_model("llama")
    pack_linears(model, library)
    logits_of(model)
    fused = [module for module in model.modules() if isinstance(module, FusedLinear)]
    assert {module.product._stash.content for module in fused} == {None}


def test_layers_with_and_without_bias_and_odd_sizes_are_fused_rightly(library: Kernels):
    torch.manual_seed(0)
    layers = (nn.Linear(20, 33), nn.Linear(20, 5, bias=False), nn.Linear(20, 64))
    model = Attention(*layers)
    rows = torch.randn(4, 20)
    wanted = model(rows)
    pack_linears(model, library)
    assert all(isinstance(getattr(model, name), FusedLinear) for name in ATTENTION)
    assert_close(model(rows), wanted)


def test_parts_that_are_called_with_another_tensor_are_computed_apart(library: Kernels):
    parts = []
    panels = torch.empty(4, 20, 32)
    weights = [torch.randn(64, 20), torch.randn(64, 20)]
    for index, weight in enumerate(weights):
        own = panels[2 * index : 2 * index + 2]
        library.pack(weight, own)
        layer = nn.Linear(20, 64, bias=False)
        parts.append(FusedLinear(PackedWeight(own, 64, 20, library), layer, torch.float32))
    product = FusedProduct(PackedWeight(panels, 128, 20, library), parts, Stash())
    first, second = torch.randn(3, 20), torch.randn(3, 20)
    parts[0](first)
    assert_close(parts[1](second), second @ weights[1].t())
    assert not product.is_fused
    assert_close(parts[0](second), second @ weights[0].t())


ATTENTION = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):
    """Three projections of one input, and a weightless input embedding."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        for name, layer in zip(ATTENTION, layers, strict=True):
            setattr(self, name, layer)

    def get_input_embeddings(self) -> nn.Module:
        return nn.Identity()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([getattr(self, name)(rows) for name in ATTENTION], dim=-1)


def test_layers_of_unlike_dtypes_are_packed_apart(library: Kernels):
    torch.manual_seed(0)
    model = Attention(*(nn.Linear(20, 32) for _ in ATTENTION))
    model.k_proj.weight.data.copy_(model.k_proj.weight.bfloat16())
    rows = torch.randn(4, 20)
    wanted = model(rows)
    pack_linears(model, library)
    assert not any(isinstance(module, FusedLinear) for module in model.modules())
    assert model.k_proj.packed.panels.dtype == torch.bfloat16
    assert_close(model(rows), wanted)


class Doubled(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(rows)


def with_hook() -> nn.Linear:
    layer = nn.Linear(20, 32)
    layer.register_forward_hook(lambda module, inputs, output: -output)
    return layer


def with_own_forward() -> nn.Linear:
    layer = nn.Linear(20, 32)
    layer.forward = torch.sin
    return layer


def with_norm() -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(20, 32))


@pytest.mark.parametrize(
    "make",
    [lambda: Doubled(20, 32), with_hook, with_own_forward, with_norm],
    ids=["class", "hook", "forward", "norm"],
)
def test_a_layer_that_is_more_than_a_product_is_left_alone(library: Kernels, make):
    layer = make()
    model = Attention(nn.Linear(20, 32), layer, nn.Linear(20, 32))
    pack_linears(model, library)
    assert model.k_proj is layer
    assert [type(each) for each in (model.q_proj, model.v_proj)] == [PackedLinear, PackedLinear]


def test_a_weight_shared_with_an_unknown_module_is_left_alone(library: Kernels):
    model = Attention(nn.Linear(20, 32), Doubled(20, 32), nn.Linear(20, 32))
    model.k_proj.weight = model.q_proj.weight
    shared = model.q_proj
    pack_linears(model, library)
    assert model.q_proj is shared
    assert type(model.v_proj) is PackedLinear


def test_two_layers_of_one_weight_share_its_packed_form(library: Kernels):
    model = Attention(*(nn.Linear(20, 32) for _ in ATTENTION))
    model.v_proj.weight = model.q_proj.weight
    pack_linears(model, library)
    assert model.v_proj.packed is model.q_proj.packed


def test_the_weight_of_a_packed_layer_has_shape_and_dtype_but_no_values(library: Kernels):
    model = Attention(*(nn.Linear(20, 32) for _ in ATTENTION)).bfloat16()
    pack_linears(model, library)
    weight = model.q_proj.weight
    assert (weight.shape, weight.dtype, weight.device.type) == ((32, 20), torch.float32, "cpu")
    assert bool(weight.isnan().all())


def test_a_model_whose_every_weight_was_packed_still_has_dtype_and_device(library: Kernels):
    model = own_model("llama")
    for module in list(model.modules()):
        for name, _ in list(module.named_children()):
            if "norm" in name:
                setattr(module, name, nn.Identity())
    pack_linears(model, library)
    assert (model.dtype, model.device.type) == (torch.float32, "cpu")
    unpack_linears(model)
    assert all(parameter.numel() for parameter in model.parameters())


def test_a_packed_weight_that_computes_something_else_is_an_error(library: Kernels, monkeypatch):
    right = Kernels.pack

    def wrong(self: Kernels, weight: torch.Tensor, packed: torch.Tensor) -> None:
        right(self, weight, packed)
        packed[0, 0, 0] += 1

    monkeypatch.setattr(Kernels, "pack", wrong)
    with pytest.raises(EngineError, match="does not compute what the original does"):
        pack_linears(own_model("gpt2"), library)
