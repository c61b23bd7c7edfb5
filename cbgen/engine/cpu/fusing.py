"""Puts one module of the C++ kernels in the place of a model's decoder layers, and checks it."""

from __future__ import annotations

import logging
from itertools import islice
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cbgen.engine.attention.base import LayerCache
from cbgen.engine.attention.context import PagedLayers, PagedStep, forward_context
from cbgen.engine.attention.cpu import CpuBackend
from cbgen.engine.batch import Rows, StepInputs
from cbgen.engine.cache.shape import CacheShape
from cbgen.engine.cpu.best_token import HeadScreen
from cbgen.engine.cpu.decoder import FusedDecoder
from cbgen.engine.cpu.decoder_layers import find_parts, layer_indices
from cbgen.engine.cpu.native import Kernels
from cbgen.engine.forward import run_model
from cbgen.engine.model.attach import attached
from cbgen.engine.sampling.params import SamplingParams
from cbgen.engine.sampling.scores import Logits, Scores
from cbgen.engine.step import AdmittedRow, NewBlocks, ScheduledBatch, ScheduledRequest

logger = logging.getLogger(__name__)

_SEQUENCES = ((1, 0, 1), (0, 1))
_PAGE_SIZE = 2
_NUM_BLOCKS = 3
"""Two for the first sequence and one for the second."""
TOLERANCE = 5e-4
"""Share of the largest logit by which packing or fusing may change one. Rounding moves those of
SmolLM2, which has very large activations, by 5e-5 of it; a wrong layer by a tenth."""


def fuse_decoder(model: PreTrainedModel, kernels: Kernels, tolerance: float = TOLERANCE) -> bool:
    """Fuse the decoder layers of a model whose linear layers are packed, if they are known.

    Where the logits of a short step differ, the model is as it was and that is logged.

    Args:
        model: a model of cbgen's own.
        kernels: the library.
        tolerance: share of the largest logit by which one may change.

    Returns:
        Whether they are fused.
    """
    parts = find_parts(model)
    if parts is None:
        return False
    owner = model.get_decoder()
    with attached(model), torch.inference_mode():
        wanted = _scores(model, parts.layers, is_fused=False).logits()
        decoder = FusedDecoder(parts, kernels)
        owner.layers = nn.ModuleList([decoder])
        logits = _scores(model, parts.layers, is_fused=True).logits()
        difference = (logits - wanted).abs().max()
        if not difference <= tolerance * wanted.abs().max():
            owner.layers = parts.layers
            logger.warning(
                "decoder layers run one operation after the other: fused, they change a logit by "
                "%g",
                difference,
            )
            return False
        decoder.screen = HeadScreen.of(parts, kernels)
        best = _scores(model, parts.layers, is_fused=True).best()
    if not all(map(torch.equal, best, Logits(logits).best())):
        decoder.screen = None
        logger.warning("best tokens are looked for in all logits: the head's screen finds others")
    return True


def _scores(model: PreTrainedModel, layers: nn.ModuleList, *, is_fused: bool) -> Scores:
    """Return the scores of some short sequences, one behind the other."""
    inputs = _inputs()
    caches = {
        index: _empty_cache(layer)
        for index, layer in zip(layer_indices(layers), layers, strict=True)
    }
    pages = PagedLayers(caches, dict.fromkeys(caches, 0))
    context = PagedStep(
        inputs.position_ids[0],
        pages,
        inputs.attention,
        CpuBackend(),
        fuses_layers=is_fused,
    )
    with forward_context(context):
        return run_model(model, inputs.token_ids, inputs.position_ids, inputs.logit_indices)


def _empty_cache(layer: Any) -> LayerCache:  # noqa: ANN401  a model's own class
    head_dim = int(layer.self_attn.head_dim)
    kv_heads = layer.self_attn.k_proj.packed.columns // head_dim
    # Places that nobody writes must not be read.
    shape = (_NUM_BLOCKS, _PAGE_SIZE, kv_heads, head_dim)
    keys, values = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
    return LayerCache(keys, values)


def _inputs() -> StepInputs:
    """Return the tensors of a step that runs all sequences and asks for all logits."""
    lengths = [len(each) for each in _SEQUENCES]
    shape = CacheShape(_PAGE_SIZE)
    rows = Rows(shape, len(lengths), table_blocks=_NUM_BLOCKS, device=torch.device("cpu"))
    rows.admit([AdmittedRow(row, each, SamplingParams()) for row, each in enumerate(_SEQUENCES)])
    blocks = iter(range(_NUM_BLOCKS))
    rows.extend_block_tables(
        [
            NewBlocks(row, 0, 0, tuple(islice(blocks, shape.num_pages(length))))
            for row, length in enumerate(lengths)
        ]
    )
    requests = [
        ScheduledRequest(row, 0, str(row), 0, length, num_logits=length)
        for row, length in enumerate(lengths)
    ]
    return rows.gather(ScheduledBatch(step=0, requests=tuple(requests), num_tokens=sum(lengths)))
