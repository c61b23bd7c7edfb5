"""The loop that `sdpa` and `eager` share: one request at a time, never a mask across requests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cbgen.engine.attention.base import LayerAttention, LayerCache, gather_pages
from cbgen.engine.attention.metadata import AttentionMetadata, causal_mask
from cbgen.engine.sizing import MOST_SCORES

Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, LayerAttention], torch.Tensor
]
"""(query [heads, Lq, D], keys [kv_heads, Lk, D], values, mask [Lq, Lk] or None, layer) -> output
[heads, Lq, Dv]"""


def attend_per_request(
    query: torch.Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    layer: LayerAttention,
    attend: Attend,
) -> torch.Tensor:
    """Run `attend` on each request's tokens; shapes as in `AttentionBackend.forward`.

    Queries of a long request run in several parts, so that the scores of all heads, which backends
    may hold in memory, stay within a bound that the plan counts on.
    """
    outputs = []
    for index in range(metadata.num_requests):
        begin, end = metadata.query_starts[index], metadata.query_starts[index + 1]
        blocks, start = metadata.key_blocks[index], metadata.key_starts[index]
        seen = slice(metadata.first_keys[index] - start, metadata.key_lens[index] - start)
        keys = gather_pages(cache.keys, blocks, seen).transpose(0, 1)
        values = gather_pages(cache.values, blocks, seen).transpose(0, 1)
        # A single query sees every key that is left.
        mask = None if end - begin == 1 else _mask(metadata, index, query.device)
        part = max(1, MOST_SCORES // (query.shape[1] * keys.shape[1]))
        for first in range(begin, end, part):
            rows = query[first : min(first + part, end)].transpose(0, 1)
            seen_by = None if mask is None else mask[first - begin : first - begin + part]
            outputs.append(attend(rows, keys, values, seen_by, layer))
    return torch.cat(outputs, dim=1).transpose(0, 1)


def _mask(metadata: AttentionMetadata, index: int, device: torch.device) -> torch.Tensor:
    mask = metadata.masks.get(index)
    if mask is None:
        mask = causal_mask(
            metadata.query_len(index),
            metadata.key_lens[index],
            metadata.span,
            metadata.first_keys[index],
            device,
        )
        metadata.masks[index] = mask
    return mask
