"""Packs a model that cbgen has loaded for a CPU, if the kernels are there and answers stay.

Packing is checked against the model run in float32 by torch's own products, of a piece of a weight
at a time, so that no weight ever stands in memory as float32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cbgen.engine.cpu import native
from cbgen.engine.cpu.fusing import TOLERANCE, fuse_decoder
from cbgen.engine.cpu.linears import is_packable, pack_linears, unpack_linears
from cbgen.errors import EngineError

logger = logging.getLogger(__name__)

_PIECE_ELEMENTS = 1 << 20
HALVES = (torch.bfloat16, torch.float16)
"""The 16-bit dtypes, whose values float32 holds exactly."""

_SEQUENCE = torch.tensor((1, 0, 1))


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a model that computes in a dtype on a device can be packed."""
    return device.type == "cpu" and dtype == torch.float32 and native.kernels() is not None


def pack_for_cpu(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Pack the linear layers of a model on the CPU that computes in float32; verify its logits.

    Where they differ, or a layer cannot be packed, the model is as it was, in float32, and that is
    logged.

    Args:
        model: a model of cbgen's own; linear layers and the input embedding may have 16 bits.
        dtype: that it computes in.

    Returns:
        Whether the model is packed.
    """
    kernels = native.kernels()
    if kernels is None:
        logger.info("linear layers run on torch: %s", native.why_missing())
        return False
    if not can_pack(model.device, dtype):
        return False
    with computing_in_float32(model):
        wanted = logits_of(model, _SEQUENCE)
    try:
        pack_linears(model, kernels)
        widen(model)
        difference = (logits_of(model, _SEQUENCE) - wanted).abs().max()
    except EngineError as error:
        unpack_linears(model)
        widen(model)
        logger.warning("linear layers run on torch: %s", error)
        return False
    if not difference <= TOLERANCE * wanted.abs().max():
        unpack_linears(model)
        logger.warning("linear layers run on torch: packed, they change a logit by %g", difference)
        return False
    fuse_decoder(model, kernels)
    return True


@torch.inference_mode()
def logits_of(model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a sequence [T], by the model's own code: [1, T, vocab] float32."""
    logits: torch.Tensor = model(input_ids=token_ids[None], use_cache=False).logits
    return logits.float()


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
