"""Plain matmul and softmax, request by request: slow, complete, for comparisons."""

from __future__ import annotations

import torch

from cbgen.engine.attention.base import LayerAttention, PerRequestBackend
from cbgen.engine.sizing import AttentionSizes


class EagerBackend(PerRequestBackend):
    """Any device, any page size, softcap and sinks."""

    @staticmethod
    def step_bytes(sizes: AttentionSizes) -> int:
        """Count masks, scores, and keys and values gathered and then repeated for every head."""
        num_heads = sizes.layer.num_kv_heads + sizes.layer.num_heads
        return sizes.mask_bytes + sizes.score_bytes + sizes.gathered_bytes(num_heads)

    @staticmethod
    def attend(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """Attend as `PerRequestBackend.attend` says."""
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
