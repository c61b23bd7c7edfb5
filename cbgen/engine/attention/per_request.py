"""The loop that `sdpa` and `eager` share: one request at a time, never a mask across requests."""

from __future__ import annotations

from abc import abstractmethod

import torch

from cbgen.engine.attention.base import AttentionBackend, LayerAttention, LayerCache
from cbgen.engine.attention.metadata import AttentionMetadata
from cbgen.engine.sizing import MOST_SCORES


class PerRequestBackend(AttentionBackend):
    """A backend that attends request by request, over gathered keys and values."""

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
            blocks, start = metadata.key_blocks[index], metadata.key_starts[index]
            seen = slice(metadata.first_keys[index] - start, metadata.key_lens[index] - start)
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
