"""Plain matmul and softmax, request by request: slow, complete, for comparisons."""

from __future__ import annotations

from typing import ClassVar

import torch

from cbgen.engine.attention.base import LayerAttention, LayerCache
from cbgen.engine.attention.metadata import AttentionMetadata
from cbgen.engine.attention.per_request import attend_per_request
from cbgen.engine.sizing import AttentionSizes, PlanFacts, Refusal


class EagerBackend:
    """Any device, any page size, softcap and sinks."""

    serves_decoder: ClassVar[bool] = False

    @staticmethod
    def refusal(_facts: PlanFacts) -> Refusal | None:
        """Refuse nothing."""
        return None

    @staticmethod
    def advantage(_facts: PlanFacts) -> str | None:
        """Have none: it is slow."""
        return None

    @staticmethod
    def step_bytes(sizes: AttentionSizes) -> int:
        """Count masks, scores, and keys and values gathered and then repeated for every head."""
        num_heads = sizes.layer.num_kv_heads + sizes.layer.num_heads
        return sizes.mask_bytes + sizes.score_bytes + sizes.gathered_bytes(num_heads)

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
