"""Packs the model that cbgen has loaded for a CPU, if the kernels are there and answers stay."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from cbgen.engine.cpu import native
from cbgen.engine.cpu.fusing import fuse_decoder
from cbgen.engine.cpu.linears import pack_linears, unpack_linears
from cbgen.engine.cpu.reference import computing_in_float32, widen
from cbgen.errors import EngineError

logger = logging.getLogger(__name__)

_SEQUENCE = (1, 0, 1)
_TOLERANCE = 5e-4
"""Share of the largest logit by which packing may change one. Rounding moves those of SmolLM2,
which has very large activations, by 5e-5 of it; a wrong layer by a tenth."""


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
        wanted = _logits(model)
    try:
        pack_linears(model, kernels)
        widen(model)
        difference = (_logits(model) - wanted).abs().max()
    except EngineError as error:
        unpack_linears(model)
        widen(model)
        logger.warning("linear layers run on torch: %s", error)
        return False
    if not difference <= _TOLERANCE * wanted.abs().max():
        unpack_linears(model)
        logger.warning("linear layers run on torch: packed, they change a logit by %g", difference)
        return False
    fuse_decoder(model, kernels)
    return True


@torch.inference_mode()
def _logits(model: PreTrainedModel) -> torch.Tensor:
    token_ids = torch.tensor([_SEQUENCE])
    logits: torch.Tensor = model(input_ids=token_ids, use_cache=False).logits
    return logits.float()
