"""Rounds the linear layers of a model on the CPU to int8, and measures what logits lose by it.

Each group of 64 input features is rotated first (csrc/kernels.h); then every weight column, and
every row that it is multiplied with, has one scale. Embedding and head stay as they are. The
original weights are gone; nothing can put them back.
"""

from __future__ import annotations

import logging
import math

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cbgen.engine.cpu import native
from cbgen.engine.cpu.fusing import fuse_decoder
from cbgen.engine.cpu.linears import pack_linears, packable_weights
from cbgen.engine.cpu.packing import computing_in_float32, logits_of, widen
from cbgen.errors import UsageError

logger = logging.getLogger(__name__)

_NUM_TOKENS = 24
_FUSING_TOLERANCE = 0.05
"""Share of the largest logit by which fusing may change one: a difference in the last bit can
become one of a whole step of int8."""
_MOST_ERROR = 0.5
"""Largest error of logits, as a share of their own spread, with which answers still mean anything.
Small models have 0.05 to 0.1."""


def check_quantization(device: torch.device, dtype: torch.dtype) -> None:
    """Check that the linear layers of a model can run in int8.

    Args:
        device: where the model is to run.
        dtype: of everything that is not int8.

    Raises:
        UsageError: they cannot.
    """
    reason = native.why_missing()
    if device.type != "cpu":
        reason = f"the model is on {device}: set model.device to cpu"
    elif dtype != torch.float32:
        reason = f"all else would be {dtype}: set model.dtype to float32"
    if reason is not None:
        raise UsageError(
            f"model.quantization is 'int8', which the C++ kernels for a CPU compute, and {reason}; "
            "or remove model.quantization",
            key="model.quantization",
        )


def quantize_for_cpu(model: PreTrainedModel) -> None:
    """Round and pack the linear layers of a model for which `check_quantization` has passed.

    How far the logits of some tokens move is logged.

    Args:
        model: a model of cbgen's own; linear layers and the input embedding may have 16 bits.

    Raises:
        UsageError: the model has no linear layers that can be rounded, or its logits are lost.
        EngineError: a packed layer does not compute what the original did.
    """
    kernels = native.kernels()
    assert kernels is not None, "check_quantization was not called"
    rounded = rounded_weights(model)
    if not rounded:
        raise UsageError(
            f"model.quantization is 'int8', and a {type(model).__name__} has no linear layers that "
            "can be rounded; remove it",
            key="model.quantization",
        )
    vocab_size = int(model.config.get_text_config().vocab_size)
    token_ids = torch.linspace(0, vocab_size - 1, min(_NUM_TOKENS, vocab_size)).long()
    with computing_in_float32(model):
        wanted = logits_of(model, token_ids)
    pack_linears(model, kernels, rounded=rounded)
    widen(model)
    # Root mean square of the differences, as a share of the deviation of the logits.
    spread = wanted - wanted.mean(dim=-1, keepdim=True)
    error = float((logits_of(model, token_ids) - wanted).norm() / spread.norm())
    if not error <= _MOST_ERROR:
        raise UsageError(
            f"model.quantization is 'int8', and it moves the logits of this model by {error:.0%} "
            "of their spread; remove it",
            key="model.quantization",
        )
    fuse_decoder(model, kernels, _FUSING_TOLERANCE)
    logger.info("int8 moves the logits by %.1f %% of their spread", 100 * error)


def rounded_weights(model: PreTrainedModel) -> list[str]:
    """Return the names of the weights of a model that become int8, on the meta device or not.

    Those of linear layers, but for the head and what shares its weight: they take a tenth of the
    time, and rounding them changes more answers than rounding any other layer.
    """
    kept = {
        id(module.weight)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module is not None
    }
    names = packable_weights(model)
    return [name for name in names if id(model.get_parameter(name)) not in kept]


def weight_bytes(
    model: PreTrainedModel,
    dtype: torch.dtype,
    packed_dtype: torch.dtype,
    quantization: str | None = None,
) -> int:
    """Return the memory that the weights of a model will take.

    Args:
        model: as it was made; it may be on the meta device.
        dtype: that it computes in.
        packed_dtype: of the weights of linear layers and of the embedding, if they are not rounded.
        quantization: of the recipe.
    """
    packable = {id(model.get_parameter(name)) for name in packable_weights(model)}
    num_bytes = sum(
        int(each.numel()) * (packed_dtype if id(each) in packable else dtype).itemsize
        for each in model.parameters()
    )
    for name in rounded_weights(model) if quantization is not None else ():
        module = model.get_submodule(name.rpartition(".")[0])
        columns, depth = module.get_parameter("weight").shape
        if isinstance(module, Conv1D):
            columns, depth = depth, columns
        num_bytes -= columns * depth * packed_dtype.itemsize
        num_bytes += math.prod(native.panel_shape(columns, depth, torch.int8))
    return num_bytes
