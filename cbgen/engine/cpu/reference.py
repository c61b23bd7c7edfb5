"""Runs a model whose linear layers hold 16-bit weights as if all of it were float32.

What packing is checked against: torch's own products, of a piece of a weight at a time, so that no
weight ever stands in memory as float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cbgen.engine.cpu.linears import is_packable

HALVES = (torch.bfloat16, torch.float16)
"""The 16-bit dtypes, whose values float32 holds exactly."""

_PIECE_ELEMENTS = 1 << 20


@contextmanager
def computing_in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Make a model compute in float32, whatever its linear layers hold; then they are as before.

    Parameters of 16 bits elsewhere become float32 for good.
    """
    widen(model, but_packable=True)
    modules = [module for module in model.modules() if _has_half_weight(module)]
    weights = [module.get_parameter("weight") for module in modules]
    try:
        for module, weight in zip(modules, weights, strict=True):
            # So that what asks the weight for its dtype is told float32.
            nothing = torch.full((1, 1), float("nan")).expand(weight.shape)
            module.weight = nn.Parameter(nothing, requires_grad=False)
            vars(module)["forward"] = _forward_of(module, weight.detach())
        yield
    finally:
        for module, weight in zip(modules, weights, strict=True):
            module.weight = weight
            vars(module).pop("forward", None)


def widen(model: nn.Module, *, but_packable: bool = False) -> None:
    """Make every parameter of 16 bits float32, one after the other.

    Args:
        model: is changed.
        but_packable: leave the weights of linear layers and embeddings that can be packed.
    """
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.dtype not in HALVES:
                continue
            if not (but_packable and name == "weight" and is_packable(module)):
                parameter.data = parameter.data.float()


def _has_half_weight(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dtype in HALVES


def _forward_of(module: nn.Module, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    if isinstance(module, nn.Embedding):
        return partial(_embed, module, weight)
    matrix = weight.t() if isinstance(module, Conv1D) else weight
    return partial(_multiply, module, matrix)


def _embed(module: nn.Module, weight: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    rows = functional.embedding(token_ids, weight).float()
    scale = module._buffers.get("embed_scale")
    return rows if scale is None else rows * scale.float()


def _multiply(module: nn.Module, matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    columns, depth = matrix.shape
    output = rows.new_empty(*rows.shape[:-1], columns)
    # One buffer for all pieces: freed one by one among what lives on, they would not be used again.
    buffer = torch.empty(min(columns, max(1, _PIECE_ELEMENTS // depth)), depth)
    for first in range(0, columns, len(buffer)):
        last = min(columns, first + len(buffer))
        piece = buffer[: last - first].copy_(matrix[first:last])
        output[..., first:last] = functional.linear(rows, piece)
    bias = module._parameters.get("bias")
    return output if bias is None else output + bias
