"""The reference backend: torch's scaled_dot_product_attention, request by request."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from cbgen.engine.attention.base import LayerAttention, PerRequestBackend
from cbgen.engine.sizing import AttentionSizes, PlanFacts, Refusal


class SdpaBackend(PerRequestBackend):
    """Any device, any page size; no softcap and no sinks, which torch's function lacks."""

    @staticmethod
    def refusal(facts: PlanFacts) -> Refusal | None:
        """Refuse models whose attention has softcap or sinks."""
        needs = [
            need
            for need in ("softcap", "sinks")
            if any(getattr(layer, f"has_{need}") for layer in facts.layers)
        ]
        if not needs:
            return None
        return Refusal(
            f"the model's attention has {' and '.join(needs)}",
            ", which sdpa cannot compute; use eager or auto",
        )

    @staticmethod
    def step_bytes(sizes: AttentionSizes) -> int:
        """Count masks, gathered keys and values, and scores where torch's function holds them."""
        gathered = sizes.gathered_bytes(sizes.layer.num_kv_heads)
        if _makes_scores(sizes):
            return sizes.mask_bytes + sizes.score_bytes + gathered
        return sizes.mask_bytes + sizes.num_pairs * sizes.itemsize + gathered

    @staticmethod
    def attend(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """Attend as `PerRequestBackend.attend` says."""
        if mask is None:
            # One query: heads that share keys become rows of one query; nothing is repeated.
            num_heads, num_kv_heads = query.shape[0], keys.shape[0]
            rows = query.reshape(1, num_kv_heads, num_heads // num_kv_heads, query.shape[-1])
            output = scaled_dot_product_attention(
                rows, keys[None], values[None], scale=layer.scaling
            )
            return output.reshape(num_heads, 1, values.shape[-1])
        return scaled_dot_product_attention(
            query[None],
            keys[None],
            values[None],
            attn_mask=mask,
            scale=layer.scaling,
            enable_gqa=True,
        )[0]


def _makes_scores(sizes: AttentionSizes) -> bool:
    """Whether torch's function falls back to its plain form, which holds every score in memory.

    With a mask it does for values of another size than the keys, and on a GPU for shared heads:
    "works only for flash attention", which takes no mask, "and math kernel on CUDA tensor".
    """
    layer = sizes.layer
    if layer.key_dim != layer.value_dim:
        return True
    return sizes.device_type != "cpu" and layer.num_heads != layer.num_kv_heads
