"""The cache's tensors: pages of every layer, and the copies between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cbgen.engine.attention.base import LayerCache
from cbgen.engine.cache.groups import LayerFacts
from cbgen.engine.step import BlockCopy


class KVStorage:
    """Owns the pages of all layers.

    Memory is reserved and never filled: on a CPU the system hands out a page of memory when it is
    first written, so a large cache costs nothing until it is used. Slots that were never written
    hold anything; nobody reads them.
    """

    def __init__(
        self,
        layers: Sequence[LayerFacts],
        *,
        num_blocks: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self._layers = {
            layer.index: LayerCache(
                keys=torch.empty(
                    num_blocks,
                    page_size,
                    layer.num_kv_heads,
                    layer.key_dim,
                    dtype=dtype,
                    device=device,
                ),
                values=torch.empty(
                    num_blocks,
                    page_size,
                    layer.num_kv_heads,
                    layer.value_dim,
                    dtype=dtype,
                    device=device,
                ),
            )
            for layer in layers
        }

    def layer(self, index: int) -> LayerCache:
        """Return the pages of a layer."""
        return self._layers[index]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the beginning of blocks into others, in every layer."""
        for copy in copies:
            for layer in self._layers.values():
                for pages in (layer.keys, layer.values):
                    pages[copy.target, : copy.num_tokens] = pages[copy.source, : copy.num_tokens]
