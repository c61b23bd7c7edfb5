"""Plain matmul and softmax, request by request: slow, complete, for comparisons."""

from __future__ import annotations

import torch

from cbgen.engine.attention.base import AttentionCapabilities, LayerAttention, LayerCache
from cbgen.engine.attention.metadata import AttentionMetadata
from cbgen.engine.attention.per_request import attend_per_request


class EagerBackend:
    """Any device, any page size, softcap and sinks."""

    name = "eager"
    capabilities = AttentionCapabilities(softcap=True, sinks=True)

    def forward(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """Attend as `AttentionBackend.forward` says."""
        return attend_per_request(query, cache, metadata, layer, _attend)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    layer: LayerAttention,
) -> torch.Tensor:
    num_heads, query_len, _ = query.shape
    group = num_heads // keys.shape[0]
    keys = keys.repeat_interleave(group, dim=0)
    values = values.repeat_interleave(group, dim=0)
    scores = torch.matmul(query, keys.transpose(1, 2)) * layer.scaling  # [heads, Lq, Lk]
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks.to(scores.dtype).reshape(num_heads, 1, 1).expand(-1, query_len, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(probabilities[..., : keys.shape[1]], values)
