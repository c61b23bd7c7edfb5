"""Recognizes Llama-like models and describes their decoder layers to the C++ kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cbgen.engine.cpu.linears import FusedLinear, PackedLinear
from cbgen.engine.cpu.native import Decoder, DecoderLayer, Product
from cbgen.engine.cpu.packed import first_columns

_PREFIXES = {
    f"transformers.models.{prefix.lower()}.modeling_{prefix.lower()}": prefix
    for prefix in ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3")
}
"""Transformers' modules -> how the names of their classes begin.

These models are an embedding, a rotary embedding of the positions, layers, a norm and a head. Their
layers are: norm, attention, norm, gated feed-forward with SiLU; each half is added to what came
in."""

_SILU = ("SiLU", "SiLUActivation")


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What a model consists of, in the order in which it is computed."""

    embedding: nn.Module
    rotary: nn.Module
    """(hidden states, position ids [1, T]) -> cos and sin, [1, T, head size]."""
    layers: nn.ModuleList
    norm: nn.Module
    head: nn.Module


def find_parts(model: PreTrainedModel) -> ModelParts | None:
    """Return the parts of a model whose layers the kernels can run; None if they cannot.

    Every module is recognized by its very class, and every linear layer must be a packed one.
    """
    if not is_known(model):
        return None
    found: Any = model
    owner, home = found.model, type(model).__module__
    parts = ModelParts(
        owner.embed_tokens, owner.rotary_emb, owner.layers, owner.norm, found.lm_head
    )
    layers: list[Any] = list(parts.layers)
    can_run = (
        bool(layers)
        and all(_is_known(layer, home) for layer in layers)
        and _is_own(home, parts.rotary, "RotaryEmbedding")
        and _are_norms([owner.norm, layers[0].input_layernorm], home)
        and len({_geometry(layer) for layer in layers}) == 1
    )
    return parts if can_run else None


def is_known(model: PreTrainedModel) -> bool:
    """Return whether a model is one of those that `find_parts` finds, as far as its class tells."""
    home = type(model).__module__
    return (
        home in _PREFIXES
        and _is_own(home, model, "ForCausalLM")
        and _is_own(home, model.model, "Model")
    )


def describe(parts: ModelParts) -> tuple[Decoder, ctypes.Array[DecoderLayer]]:
    """Describe what `find_parts` has found; caches and groups of the layers are still to be set.

    Returns:
        The whole as the library takes it, and its layers; the modules keep what it points to.
    """
    layers = parts.layers
    described = (DecoderLayer * len(layers))()
    for layer, place in zip(layers, described, strict=True):
        _describe_layer(layer, place)
    first: Any = layers[0]
    attention, mlp = first.self_attn, first.mlp
    query, key, value = _offsets([attention.q_proj, attention.k_proj, attention.v_proj])
    head_dim = int(attention.head_dim)
    decoder = Decoder(
        layers=described,
        num_layers=len(layers),
        last_norm=parts.norm.get_parameter("weight").data_ptr(),
        hidden_size=attention.o_proj.packed.columns,
        heads=attention.q_proj.packed.columns // head_dim,
        kv_heads=attention.k_proj.packed.columns // head_dim,
        head_dim=head_dim,
        query_offset=query,
        key_offset=key,
        value_offset=value,
        heads_width=value + attention.v_proj.packed.columns,
        intermediate_size=mlp.down_proj.packed.depth,
        epsilon=first.input_layernorm.variance_epsilon,
    )
    return decoder, described


def layer_indices(layers: nn.ModuleList) -> tuple[int, ...]:
    """Return the numbers by which the attention of these layers calls itself."""
    found: Any = layers
    return tuple(int(layer.self_attn.layer_idx) for layer in found)


def _describe_layer(layer: Any, place: DecoderLayer) -> None:  # noqa: ANN401  a model's own class
    attention, mlp = layer.self_attn, layer.mlp
    place.attention_norm = layer.input_layernorm.weight.data_ptr()
    place.mlp_norm = layer.post_attention_layernorm.weight.data_ptr()
    if hasattr(attention, "q_norm"):
        place.query_norm = attention.q_norm.weight.data_ptr()
        place.key_norm = attention.k_norm.weight.data_ptr()
    place.query_key_value = _product([attention.q_proj, attention.k_proj, attention.v_proj])
    place.output = _product([attention.o_proj])
    place.gate = mlp.gate_proj.packed.argument(mlp.gate_proj.bias)
    place.up = mlp.up_proj.packed.argument(mlp.up_proj.bias)
    place.down = _product([mlp.down_proj])
    place.rotary_dim = attention.head_dim if getattr(attention, "use_rope", True) else 0
    place.scaling = attention.scaling


def _product(linears: Sequence[PackedLinear]) -> Product:
    """Return linear layers of one input as one product, packed together or not."""
    product = Product()
    whole = linears[0].product if isinstance(linears[0], FusedLinear) else None
    if whole is not None:
        product.count = 1
        product.parts[0] = whole.packed.argument(whole.bias)
        return product
    product.count = len(linears)
    for index, (linear, offset) in enumerate(zip(linears, _offsets(linears), strict=True)):
        product.offsets[index] = offset
        product.parts[index] = linear.packed.argument(linear.bias)
    return product


def _offsets(linears: Sequence[PackedLinear]) -> list[int]:
    """Return the first column of each layer's output, side by side: as a fused product has them."""
    return first_columns([linear.packed for linear in linears])


def _is_own(home: str, module: object, kind: str) -> bool:
    """Return whether the class of a module is the one of that kind in one of transformers' modules.

    Args:
        home: name of transformers' module.
        module: of a model.
        kind: what follows the prefix in the name of the class.
    """
    found = type(module)
    return found.__module__ == home and found.__name__ == _PREFIXES[home] + kind


def _is_known(layer: Any, home: str) -> bool:  # noqa: ANN401  a model's own class
    if not (
        _is_own(home, layer, "DecoderLayer")
        and _is_own(home, layer.self_attn, "Attention")
        and _is_own(home, layer.mlp, "MLP")
    ):
        return False
    attention = layer.self_attn
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    if hasattr(attention, "q_norm"):
        norms += [attention.q_norm, attention.k_norm]
    return (
        _are_norms(norms, home)
        and all(isinstance(linear, PackedLinear) for linear in _linears(layer))
        and layer.mlp.gate_proj.packed.is_rounded == layer.mlp.up_proj.packed.is_rounded
        and type(layer.mlp.act_fn).__name__ in _SILU
    )


def _are_norms(norms: Sequence[Any], home: str) -> bool:
    """Return whether these are the model's norms, of one epsilon, in float32."""
    return all(_is_own(home, norm, "RMSNorm") and _is_plain(norm.weight) for norm in norms) and (
        len({norm.variance_epsilon for norm in norms}) == 1
    )


def _is_plain(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.is_contiguous() and weight.device.type == "cpu"


def _geometry(layer: Any) -> tuple[int | float, ...]:  # noqa: ANN401  a model's own class
    sizes = [size for each in _linears(layer) for size in (each.packed.columns, each.packed.depth)]
    return (layer.self_attn.head_dim, layer.input_layernorm.variance_epsilon, *sizes)


def _linears(layer: Any) -> list[Any]:  # noqa: ANN401  a model's own class
    attention, mlp = layer.self_attn, layer.mlp
    return [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]
