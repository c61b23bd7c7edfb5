"""The cache's tensors: pages of every layer, copies between blocks, and the host's pool of blocks.

A block of the pool is one page in each layer of whichever group holds it. Layers at the same place
in their groups share one tensor of keys and one of values, since a block is one group's at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch

from cbgen.engine.attention.base import LayerCache
from cbgen.engine.cache.groups import layers_by_place
from cbgen.engine.cache.shape import CacheShape
from cbgen.engine.step import BlockCopy, BlockSwap

_STAGING_BYTES = 1 << 26
"""Device memory that swaps pass through at once: a few blocks of a large model, which is enough to
keep the bus busy."""
_HOST_CHUNK_BYTES = 1 << 30
"""Most bytes of one tensor of the host pool. torch rounds pinned memory up to a power of two, so a
pool in one piece could take twice its size."""


class KVStorage:
    """Owns the pages of all layers, on the device and on the host.

    Memory is reserved and never filled: on a CPU the system hands out a page of memory when it is
    first written, so a large cache costs nothing until it is used. Slots that were never written
    hold anything; nobody reads them.

    Attributes:
        layers: the pages of every layer.
    """

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        """Reserve the memory.

        Args:
            shape: groups, blocks and pages. Host blocks are in pinned memory if the device is a
                GPU; with 0 of them there is no host pool.
            device: where the pages are.
        """
        # One tensor of keys and one of values for each place: [blocks, tokens of a page, heads,
        # dim], or [blocks, elements of the largest page] where the layers' pages differ.
        self._pages: list[torch.Tensor] = []
        self.layers: dict[int, LayerCache] = {}
        for layers in layers_by_place(shape.groups):
            all_keys, keys = _shared_pages(shape, [*map(shape.key_page, layers)], device)
            all_values, values = _shared_pages(shape, [*map(shape.value_page, layers)], device)
            self._pages += [all_keys, all_values]
            for layer, layer_keys, layer_values in zip(layers, keys, values, strict=True):
                self.layers[layer.index] = LayerCache(layer_keys, layer_values)
        self._page_sizes = [each[0].numel() for each in self._pages]
        # The host pool: a block is one row of memory, the pages of all places in it.
        self._block_bytes = max(1, sum(self._page_sizes) * _dtype(shape).itemsize)
        self._rows_a_chunk = max(1, _HOST_CHUNK_BYTES // self._block_bytes)
        self._host_chunks = [
            torch.empty(
                min(self._rows_a_chunk, shape.num_host_blocks - begin),
                sum(self._page_sizes),
                dtype=_dtype(shape),
                pin_memory=device.type == "cuda",
            )
            for begin in range(0, shape.num_host_blocks, self._rows_a_chunk)
        ]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the beginning of blocks into others; all copies read before any of them writes.

        Every copy moves as many tokens as the longest one: what lies behind the tokens that a
        request has computed is undefined.
        """
        if not copies or not self._pages:
            return
        device = self._pages[0].device
        sources = torch.tensor([copy.source for copy in copies]).to(device, non_blocking=True)
        targets = torch.tensor([copy.target for copy in copies]).to(device, non_blocking=True)
        num_tokens = max(copy.num_tokens for copy in copies)
        for pages in self._pages:
            # Whose page a block is decides where its tokens lie, so shared pages are copied whole.
            end = num_tokens if pages.dim() > 2 else pages.shape[1]
            pages[targets, :end] = pages[sources, :end]

    def swap_out(self, swaps: Sequence[BlockSwap]) -> None:
        """Copy blocks from the device into the host pool."""
        for some, blocks, staging in self._staged(swaps):
            for pages, part in self._by_place(staging):
                part.copy_(pages.flatten(1)[blocks])
            for row, swap in zip(staging.unbind(0), some, strict=True):
                self._host_row(swap.host_block).copy_(row, non_blocking=True)

    def swap_in(self, swaps: Sequence[BlockSwap]) -> None:
        """Copy blocks from the host pool to the device."""
        for some, blocks, staging in self._staged(swaps):
            for row, swap in zip(staging.unbind(0), some, strict=True):
                row.copy_(self._host_row(swap.host_block), non_blocking=True)
            for pages, part in self._by_place(staging):
                pages.flatten(1)[blocks] = part

    def _host_row(self, block: int) -> torch.Tensor:
        return self._host_chunks[block // self._rows_a_chunk][block % self._rows_a_chunk]

    def _staged(
        self, swaps: Sequence[BlockSwap]
    ) -> Iterator[tuple[Sequence[BlockSwap], torch.Tensor, torch.Tensor]]:
        """Cut swaps into parts: k of them, their device blocks [k] int64, staging [k, width].

        Blocks cross the bus whole, through a contiguous staging tensor on the device that one index
        operation a place fills or empties.

        Nothing waits and no data can be missed, because all of it is ordered by the device's
        stream: a swap out reads pages after the steps that wrote them and before whatever is
        written into these blocks next; a swap in reads a host block after the swap out that filled
        it; and the host itself reads no byte of the pool. This holds as long as all steps run on
        one stream.
        """
        if not self._pages:
            return
        most = max(1, _STAGING_BYTES // self._block_bytes)
        for begin in range(0, len(swaps), most):
            some = swaps[begin : begin + most]
            first = self._pages[0]
            blocks = torch.tensor([swap.device_block for swap in some])
            blocks = blocks.to(first.device, non_blocking=True)
            yield some, blocks, first.new_empty(len(some), sum(self._page_sizes))

    def _by_place(self, staging: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return the pages of each place, and the columns of a staging tensor that are theirs."""
        return zip(self._pages, torch.split(staging, self._page_sizes, 1), strict=True)


def _dtype(shape: CacheShape) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, shape.dtype)
    return dtype


def _shared_pages(
    shape: CacheShape, page_shapes: Sequence[tuple[int, int, int]], device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Reserve pages that layers share.

    Args:
        shape: blocks and dtype.
        page_shapes: (tokens, heads, dim) of each layer's page.
        device: where the pages are.

    Returns:
        The whole tensor, and each layer's view of it [blocks, tokens of a page, heads, dim].
    """
    sizes = [prod(page) for page in page_shapes]
    pages = torch.empty(shape.num_pool_blocks, max(sizes), dtype=_dtype(shape), device=device)
    views = [pages[:, :size].view(-1, *page) for size, page in zip(sizes, page_shapes, strict=True)]
    # Views of pages that are all alike are contiguous: the tokens of blocks side by side are one.
    return (views[0] if len(set(page_shapes)) == 1 else pages), views
