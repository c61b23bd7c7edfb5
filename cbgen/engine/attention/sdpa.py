"""The reference backend: torch's scaled_dot_product_attention, request by request."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from cbgen.engine.attention.base import AttentionCapabilities, LayerAttention, LayerCache
from cbgen.engine.attention.metadata import AttentionMetadata
from cbgen.engine.attention.per_request import attend_per_request


class SdpaBackend:
    """Any device, any page size; no softcap and no sinks, which torch's function lacks."""

    name = "sdpa"
    capabilities = AttentionCapabilities(softcap=False, sinks=False)

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
    if mask is None:
        # One query: the heads that share keys become rows of one query, and nothing is repeated.
        num_heads, num_kv_heads = query.shape[0], keys.shape[0]
        rows = query.reshape(1, num_kv_heads, num_heads // num_kv_heads, query.shape[-1])
        output = scaled_dot_product_attention(rows, keys[None], values[None], scale=layer.scaling)
        return output.reshape(num_heads, 1, values.shape[-1])
    return scaled_dot_product_attention(
        query[None],
        keys[None],
        values[None],
        attn_mask=mask,
        scale=layer.scaling,
        enable_gqa=True,
    )[0]
