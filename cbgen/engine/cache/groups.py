"""Layer groups: layers with one kind of attention share one block table. No tensors.

All groups are served by one pool of equal blocks, so that memory moves freely between them. To make
the blocks equal, layers of one kind are split into groups of about the same number of layers, as
vLLM's hybrid cache does: 22 sliding and 4 full layers become six sliding groups and one full one,
and a block is a page in each of up to four layers. Layers at the same place in their groups share
one tensor of pages; a block belongs to one group at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_MOST_WASTE = 0.1
"""Share of a block that may be empty, in groups with fewer layers than the largest one."""


class AttentionSpan(NamedTuple):
    """Which keys a query sees: all up to its own, the last ones, or those of its chunk."""

    window: int | None = None
    """Sliding: the query's own key and the `window - 1` before it, as transformers counts."""
    chunk: int | None = None
    """Chunked (Llama 4): the keys from the last multiple of `chunk` on."""

    @property
    def is_full(self) -> bool:
        """Whether every earlier key is seen."""
        return self.window is None and self.chunk is None

    def first_key(self, position: int) -> int:
        """Return the position of the earliest key that a query at `position` sees.

        It never decreases with the position, so earlier keys can be forgotten.
        """
        if self.window is not None:
            return max(0, position - self.window + 1)
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0

    @property
    def reach(self) -> int | None:
        """Most keys that a query sees, its own included; None = all."""
        return self.window if self.window is not None else self.chunk


ALL_KEYS = AttentionSpan()


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What the probe saw of one attention layer."""

    index: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    span: AttentionSpan = ALL_KEYS
    """Which keys a query sees."""
    has_softcap: bool = False
    has_sinks: bool = False

    def token_bytes(self, itemsize: int) -> int:
        """Return the bytes of one token in this layer, key and value together."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * itemsize


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers whose pages are handed out together: one block is one page in each of them."""

    span: AttentionSpan
    layers: tuple[LayerFacts, ...]


def group_layers(layers: Sequence[LayerFacts]) -> tuple[LayerGroup, ...]:
    """Sort layers into groups of about equal size, each of one attention span."""
    by_span: dict[AttentionSpan, list[LayerFacts]] = {}
    for layer in layers:
        by_span.setdefault(layer.span, []).append(layer)
    size = _group_size([len(members) for members in by_span.values()])
    groups = []
    for span, members in by_span.items():
        # Layers at the same place share a tensor, so large pages come together.
        members.sort(key=lambda layer: -layer.token_bytes(1))
        count = -(-len(members) // size)
        groups += [LayerGroup(span, tuple(members[first::count])) for first in range(count)]
    return tuple(groups)


def layers_by_place(groups: Sequence[LayerGroup]) -> list[list[LayerFacts]]:
    """Return, for each place in a group, the layers that stand there: they share their memory."""
    num_places = max((len(group.layers) for group in groups), default=0)
    return [
        [group.layers[place] for group in groups if place < len(group.layers)]
        for place in range(num_places)
    ]


def _group_size(counts: Sequence[int]) -> int:
    """Return the largest group size that leaves little of the blocks empty; 1 leaves nothing.

    Args:
        counts: layers of each kind.
    """
    for size in range(max(counts, default=1), 1, -1):
        places = size * sum(-(-count // size) for count in counts)
        if sum(counts) >= (1 - _MOST_WASTE) * places:
            return size
    return 1
