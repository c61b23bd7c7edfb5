"""The interface of attention backends, and what each can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from cbgen.engine.attention.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class AttentionCapabilities:
    """What a backend can compute; the plan picks a backend that can do what the model needs."""

    softcap: bool
    sinks: bool
    page_multiple: int = 1
    """Page sizes must be a multiple of this."""
    graph_capturable: bool = False


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What the model's layer asks for, beside its tensors."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    """[num_heads] extra logits that take part in the softmax and carry no value."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The pages of one layer: [num_blocks, page_size, num_kv_heads, key_dim or value_dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    def write(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store the step's keys and values, each [T, num_kv_heads, dim], at their slots."""
        self.keys.flatten(0, 1).index_copy_(0, slot_mapping, key)
        self.values.flatten(0, 1).index_copy_(0, slot_mapping, value)


class AttentionBackend(Protocol):
    """Attention over pages. One instance serves all layers of an engine and keeps no state."""

    name: str
    capabilities: AttentionCapabilities

    def forward(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """Attend each token to its own request's tokens, in order.

        Args:
            query: [T, num_heads, key_dim].
            cache: pages of the layer, the step's own keys and values already written.
            metadata: places of the step's tokens.
            layer: scaling and special needs of the layer.

        Returns:
            [T, num_heads, value_dim].
        """


def gather_pages(pages: torch.Tensor, blocks: slice | torch.Tensor, length: int) -> torch.Tensor:
    """Return one request's keys or values out of its pages: [length, num_kv_heads, dim]."""
    return pages[blocks].flatten(0, 1)[:length]
