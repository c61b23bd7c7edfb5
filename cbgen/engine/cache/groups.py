"""Layer groups: layers with one kind of attention share one block table. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What the probe saw of one attention layer."""

    index: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None = None
    """Keys that a query sees, its own included; None = all."""
    has_softcap: bool = False
    has_sinks: bool = False

    def page_bytes(self, page_size: int, itemsize: int) -> int:
        """Return the bytes of one page of this layer, keys and values together."""
        return page_size * self.num_kv_heads * (self.key_dim + self.value_dim) * itemsize


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers whose pages are handed out together: one block is one page in each of them."""

    layers: tuple[LayerFacts, ...]

    def block_bytes(self, page_size: int, itemsize: int) -> int:
        """Return the bytes of one block."""
        return sum(layer.page_bytes(page_size, itemsize) for layer in self.layers)


def group_layers(layers: Sequence[LayerFacts]) -> tuple[LayerGroup, ...]:
    """Sort layers into groups.

    All layers are in one group: sliding layers keep their whole sequence, and the window is applied
    by the attention backend.
    """
    return (LayerGroup(tuple(layers)),)
