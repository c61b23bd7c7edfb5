"""The interface of attention backends: what each declares for the plan, and what it computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from cbgen.engine.attention.metadata import AttentionMetadata
from cbgen.engine.sizing import MOST_SCORES, AttentionSizes, PlanFacts, Refusal


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What the model's layer asks for, beside its tensors."""

    scaling: float
    sliding_window: int | None = None
    """As the layer tells it, for the probe. Backends read the span of the metadata, which is also
    known where the layer does not tell."""
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    """[num_heads] extra logits that take part in the softmax and carry no value."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The pages of one layer, in its dtype and on its device.

    Block b begins `keys.stride(0)` elements after block b - 1, which may be more than the layer's
    own page: a layer with larger pages may share the memory. Within a page there are no gaps.
    """

    keys: torch.Tensor
    """[num_blocks, tokens of a page, num_kv_heads, key_dim]."""
    values: torch.Tensor
    """[num_blocks, tokens of a page, num_kv_heads, value_dim]."""

    def write(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store the step's keys and values at their slots.

        Args:
            key: [T, num_kv_heads, key_dim].
            value: [T, num_kv_heads, value_dim].
            slot_mapping: [T] int64, block * tokens of a page + offset.
        """
        _write_slots(self.keys, key, slot_mapping)
        _write_slots(self.values, value, slot_mapping)


def _write_slots(pages: torch.Tensor, tokens: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    if pages.is_contiguous():
        pages.flatten(0, 1).index_copy_(0, slot_mapping, tokens)
        return
    # Flattening strided pages would make a copy of them, and the tokens would land there.
    size = pages.shape[1]
    pages[slot_mapping // size, slot_mapping % size] = tokens


class AttentionBackend(ABC):
    """Attention over pages. One instance serves all layers of an engine and keeps no state."""

    serves_decoder: ClassVar[bool] = False
    """Whether decoder layers of the C++ kernels may attend in its place, with the same result."""

    @staticmethod
    def refusal(_facts: PlanFacts) -> Refusal | None:
        """Return why it cannot serve a model on a machine, or None if it can."""
        return None

    @staticmethod
    def advantage(_facts: PlanFacts) -> str | None:
        """Return why it is the best choice where it can be had, if there is more to say."""
        return None

    @staticmethod
    @abstractmethod
    def step_bytes(sizes: AttentionSizes) -> int:
        """Return the memory that one layer takes beside the cache in a step of these sizes."""

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """Attend each token to those of its own request that the span shows it, itself the last.

        Args:
            query: [T, num_heads, key_dim].
            cache: pages of the layer, the step's own keys and values already written.
            metadata: places of the step's tokens in the layer's group, and what a query sees.
            layer: scaling and special needs of the layer.

        Returns:
            [T, num_heads, value_dim].
        """


class PerRequestBackend(AttentionBackend):
    """Attends request by request, over gathered keys and values; never a mask across requests."""

    @staticmethod
    @abstractmethod
    def attend(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """Attend queries of one request to its keys.

        Args:
            query: [num_heads, Lq, key_dim].
            keys: [num_kv_heads, Lk, key_dim].
            values: [num_kv_heads, Lk, value_dim].
            mask: [Lq, Lk] bool, which keys each query sees; None = all.
            layer: scaling and special needs of the layer.

        Returns:
            [num_heads, Lq, value_dim].
        """

    def forward(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """Attend as `AttentionBackend.forward` says.

        Queries of a long request run in several parts, so that the scores of all heads, which
        backends may hold in memory, stay within a bound that the plan counts on.
        """
        outputs = []
        for index in range(metadata.num_requests):
            begin, end = metadata.query_starts[index], metadata.query_starts[index + 1]
            blocks, first_key = metadata.key_blocks[index], metadata.first_keys[index]
            offset = first_key % cache.keys.shape[1]
            seen = slice(offset, offset + metadata.key_lens[index] - first_key)
            keys = cache.keys[blocks].flatten(0, 1)[seen].transpose(0, 1)
            values = cache.values[blocks].flatten(0, 1)[seen].transpose(0, 1)
            # A single query sees every key that is left.
            mask = None if end - begin == 1 else metadata.mask(index, query.device)
            part = max(1, MOST_SCORES // (query.shape[1] * keys.shape[1]))
            for first in range(begin, end, part):
                rows = query[first : min(first + part, end)].transpose(0, 1)
                seen_by = None if mask is None else mask[first - begin : first - begin + part]
                outputs.append(self.attend(rows, keys, values, seen_by, layer))
        return torch.cat(outputs, dim=1).transpose(0, 1)
