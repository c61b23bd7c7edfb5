"""Packs the model that cbgen has loaded for a CPU, if the kernels are there and answers stay."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from cbgen.engine import native
from cbgen.engine.model.linears import pack_linears, unpack_linears
from cbgen.errors import EngineError

logger = logging.getLogger(__name__)

_SEQUENCE = (1, 0, 1)
_TOLERANCE = 1e-5
"""Share of the largest logit by which packing may change one; rounding makes far less."""


def pack_for_cpu(model: PreTrainedModel) -> bool:
    """Pack the linear layers of a float32 model on the CPU, and verify its logits.

    Where they differ, or a layer cannot be packed, the model is as it was and that is logged.

    Returns:
        Whether the model is packed.
    """
    kernels = native.kernels()
    if kernels is None:
        logger.info("linear layers run on torch: %s", native.why_missing())
        return False
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return False
    wanted = _logits(model)
    try:
        pack_linears(model, kernels)
        difference = (_logits(model) - wanted).abs().max()
    except EngineError as error:
        unpack_linears(model)
        logger.warning("linear layers run on torch: %s", error)
        return False
    if not difference <= _TOLERANCE * wanted.abs().max():
        unpack_linears(model)
        logger.warning("linear layers run on torch: packed, they change a logit by %g", difference)
        return False
    return True


@torch.inference_mode()
def _logits(model: PreTrainedModel) -> torch.Tensor:
    token_ids = torch.tensor([_SEQUENCE])
    logits: torch.Tensor = model(input_ids=token_ids, use_cache=False).logits
    return logits.float()
