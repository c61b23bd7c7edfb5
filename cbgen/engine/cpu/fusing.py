"""Puts one module of the C++ kernels in the place of a model's decoder layers, and checks it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cbgen.engine.attention.base import LayerAttention, LayerCache
from cbgen.engine.attention.context import PagedLayers, PagedStep, forward_context
from cbgen.engine.attention.cpu import CpuBackend
from cbgen.engine.attention.metadata import AttentionMetadata
from cbgen.engine.cache.groups import AttentionSpan
from cbgen.engine.cpu.best_token import HeadScreen
from cbgen.engine.cpu.decoder import FusedDecoder
from cbgen.engine.cpu.decoder_layers import find_parts, layer_indices
from cbgen.engine.cpu.native import Kernels
from cbgen.engine.model.attach import attached
from cbgen.engine.model.probe import run_model
from cbgen.engine.sampling.scores import Logits, Scores

logger = logging.getLogger(__name__)

_SEQUENCES = ((1, 0, 1), (0, 1))
_PAGE_SIZE = 2
_TOLERANCE = 5e-4
"""Share of the largest logit by which fusing may change one. Rounding moves those of SmolLM2,
which has very large activations, by 5e-5 of it; a wrong layer by a tenth."""


def fuse_decoder(model: PreTrainedModel, kernels: Kernels, tolerance: float = _TOLERANCE) -> bool:
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


class _Pages:
    """Answers the layers of one step that begins some sequences, as the engine would."""

    def __init__(
        self, caches: Mapping[int, LayerCache], positions: torch.Tensor, *, is_fused: bool
    ) -> None:
        self.positions = positions
        self._caches = caches
        self._metadata = _metadata()
        self._backend = CpuBackend()
        layers = PagedLayers(caches, dict.fromkeys(caches, 0))
        self.paged = PagedStep(layers, (self._metadata,)) if is_fused else None

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerAttention,
    ) -> torch.Tensor:
        cache = self._caches[layer_index]
        cache.write(key, value, self._metadata.slot_mapping)
        return self._backend.forward(query, cache, self._metadata, layer)


def _scores(model: PreTrainedModel, layers: nn.ModuleList, *, is_fused: bool) -> Scores:
    """Return the scores of some short sequences, one behind the other."""
    token_ids = torch.tensor([[token for each in _SEQUENCES for token in each]])
    positions = torch.cat([torch.arange(len(each)) for each in _SEQUENCES])
    caches = {
        index: _empty_cache(layer)
        for index, layer in zip(layer_indices(layers), layers, strict=True)
    }
    with forward_context(_Pages(caches, positions, is_fused=is_fused)):
        every = torch.arange(len(positions))
        return run_model(model, token_ids, positions[None], every)


def _empty_cache(layer: Any) -> LayerCache:  # noqa: ANN401  a model's own class
    head_dim = int(layer.self_attn.head_dim)
    kv_heads = layer.self_attn.k_proj.packed.columns // head_dim
    num_blocks = sum(-(-len(each) // _PAGE_SIZE) for each in _SEQUENCES)
    # Places that nobody writes must not be read.
    shape = (num_blocks, _PAGE_SIZE, kv_heads, head_dim)
    keys, values = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
    return LayerCache(keys, values)


def _metadata() -> AttentionMetadata:
    lengths = [len(each) for each in _SEQUENCES]
    starts, tables, slots = [0], [], []
    next_block = 0
    for length in lengths:
        starts.append(starts[-1] + length)
        num_blocks = -(-length // _PAGE_SIZE)
        tables.append(torch.arange(next_block, next_block + num_blocks))
        slots += [next_block * _PAGE_SIZE + token for token in range(length)]
        next_block += num_blocks
    return AttentionMetadata(
        span=AttentionSpan(),
        query_starts=starts,
        key_lens=lengths,
        block_tables=nn.utils.rnn.pad_sequence(tables, batch_first=True),
        slot_mapping=torch.tensor(slots),
        first_keys=[0] * len(lengths),
        key_starts=[0] * len(lengths),
        key_blocks=list(tables),
    )
