"""The loop that `sdpa` and `eager` share: one request at a time, never a mask across requests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cbgen.engine.attention.base import LayerAttention, LayerCache, gather_pages
from cbgen.engine.attention.metadata import AttentionMetadata, causal_mask

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
    """Run `attend` on each request's tokens; shapes as in `AttentionBackend.forward`."""
    outputs = []
    for index in range(metadata.num_requests):
        begin, end = metadata.query_starts[index], metadata.query_starts[index + 1]
        length = metadata.key_lens[index]
        blocks = metadata.key_blocks[index]
        keys = gather_pages(cache.keys, blocks, length).transpose(0, 1)
        values = gather_pages(cache.values, blocks, length).transpose(0, 1)
        mask = None
        if end - begin == 1:
            # A single query sees every key, so a window is a matter of cutting.
            if layer.sliding_window is not None:
                keys = keys[:, -layer.sliding_window :]
                values = values[:, -layer.sliding_window :]
        else:
            mask = _mask(metadata, index, layer.sliding_window, query.device)
        outputs.append(attend(query[begin:end].transpose(0, 1), keys, values, mask, layer))
    return torch.cat(outputs, dim=1).transpose(0, 1)


def _mask(
    metadata: AttentionMetadata, index: int, window: int | None, device: torch.device
) -> torch.Tensor:
    mask = metadata.masks.get((index, window))
    if mask is None:
        mask = causal_mask(metadata.query_len(index), metadata.key_lens[index], window, device)
        metadata.masks[index, window] = mask
    return mask
