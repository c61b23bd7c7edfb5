"""Modules that compute with packed weights, in the place of linear layers and embeddings.

A packed weight keeps every value exactly, in the smallest of bfloat16, float16 and float32 that
can, or rounds them to int8; what goes in and comes out is float32 whatever the weights are. The
modules keep the module that they stand for, without its weight, so that everything can be put back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from cbgen.engine.cpu.arena import Arena
from cbgen.engine.cpu.native import PACKED_FORMATS, PANEL, Kernels, Linear, panel_shape

_UNPACK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [columns, depth] in the form that the kernels read."""

    panels: torch.Tensor
    """Of `native.panel_shape`."""
    columns: int
    depth: int
    """Columns of the input."""
    kernels: Kernels

    @classmethod
    def pack(
        cls,
        weight: torch.Tensor,
        kernels: Kernels,
        dtype: torch.dtype | None = None,
        arena: Arena | None = None,
    ) -> PackedWeight:
        """Pack a weight.

        Args:
            weight: [columns, depth] float32, bfloat16 or float16, strided in any way.
            kernels: the library.
            dtype: one that holds every value exactly, or int8; None = the smallest such.
            arena: where the packed form lies; None = in memory of its own.
        """
        columns, depth = weight.shape
        dtype = dtype or kernels.exact_dtype(weight)
        shape = panel_shape(columns, depth, dtype)
        panels = torch.empty(shape, dtype=dtype) if arena is None else arena.empty(shape, dtype)
        kernels.pack(weight, panels)
        return cls(panels, columns, depth, kernels)

    @classmethod
    def pack_side_by_side(
        cls, weights: Sequence[torch.Tensor], kernels: Kernels, dtype: torch.dtype, arena: Arena
    ) -> tuple[PackedWeight, list[PackedWeight]]:
        """Pack weights of one depth so that one product computes them all.

        Args:
            weights: as in `pack`.
            kernels: the library.
            dtype: as in `pack`.
            arena: where the packed forms lie.

        Returns:
            All of them as one weight, in which each begins with a panel of its own, and each.
        """
        depth = weights[0].shape[1]
        counts = [num_panels(weight.shape[0]) for weight in weights]
        panels = arena.empty(panel_shape(sum(counts) * PANEL, depth, dtype), dtype)
        parts = []
        first = 0
        for weight, count in zip(weights, counts, strict=True):
            own_panels = panels[first : first + count]
            first += count
            kernels.pack(weight, own_panels)
            parts.append(cls(own_panels, weight.shape[0], depth, kernels))
        columns = sum(counts[:-1]) * PANEL + weights[-1].shape[0]
        return cls(panels, columns, depth, kernels), parts

    @property
    def is_rounded(self) -> bool:
        """Whether it is int8, and not exactly what was packed."""
        return self.panels.dtype == torch.int8

    @property
    def num_bytes(self) -> int:
        """Memory of the packed form."""
        return self.panels.numel() * self.panels.element_size()

    def multiply(self, rows: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows times this weight, plus a bias.

        Args:
            rows: [..., depth] of any floating dtype.
            bias: [columns] float32.

        Returns:
            [..., columns] in the dtype of `rows`; summed in float32.
        """
        flat = rows.reshape(-1, self.depth).float()
        if flat.stride(-1) != 1:
            flat = flat.contiguous()
        output = torch.empty(flat.shape[0], self.columns)
        self.kernels.linear(flat, self.panels, bias=bias, output=output)
        return output.to(rows.dtype).view(*rows.shape[:-1], self.columns)

    def argument(self, bias: torch.Tensor | None) -> Linear:
        """Return this weight as the library takes it, without rows, input and output."""
        return Linear(
            weights=self.panels.data_ptr(),
            depth=self.depth,
            columns=self.columns,
            bias=None if bias is None else bias.data_ptr(),
            format=PACKED_FORMATS[self.panels.dtype],
        )

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight: [*indices.shape, depth] float32.

        Raises:
            IndexError: an index is outside of the weight.
        """
        flat = indices.reshape(-1).contiguous()
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < self.columns:
            raise IndexError(
                f"token ids from {int(flat.min())} to {int(flat.max())} were looked up in a table "
                f"of {self.columns} rows"
            )
        output = torch.empty(flat.numel(), self.depth)
        self.kernels.unpack_rows(self.panels, flat.long(), output)
        return output.view(*indices.shape, self.depth)

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight as it was, or as it was rounded: [columns, depth]."""
        weight = torch.empty(self.columns, self.depth, dtype=dtype)
        for first in range(0, self.columns, _UNPACK_ROWS):
            indices = torch.arange(first, min(self.columns, first + _UNPACK_ROWS))
            weight[indices] = self.rows(indices).to(dtype)
        return weight


def num_panels(columns: int) -> int:
    """Return the panels of a weight with so many columns."""
    return -(-columns // PANEL)


class PackedModule(nn.Module):
    """Stands for a module whose weight is packed."""

    def __init__(self, packed: PackedWeight, original: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed = packed
        # In a list, so that it is no part of the model.
        self._originals = [original]
        shape = original.get_parameter("weight").shape
        nothing = torch.full((1, 1), float("nan"), dtype=dtype).expand(shape)
        original.weight = nn.Parameter(nothing, requires_grad=False)

    @property
    def original(self) -> nn.Module:
        """The module that this one stands for, without its weight."""
        return self._originals[0]

    @property
    def weight(self) -> torch.Tensor:
        """Shape, dtype and device of the weight, which models ask for; its values are NaN."""
        return self.original.get_parameter("weight")


class PackedLinear(PackedModule):
    """Stands for an `nn.Linear` or a `Conv1D`."""

    def __init__(self, packed: PackedWeight, original: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(packed, original, dtype)
        bias = original._parameters.get("bias")
        self.bias = None if bias is None else bias.detach().float().contiguous()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [..., columns] of [..., depth]."""
        return self.packed.multiply(rows, self.bias)


class FusedProduct:
    """Several linear layers of one input as one product, computed when the first of them is called.

    The others take their columns of the result, as long as they are called with the very same
    tensor. A model that calls them otherwise gets separate products from then on.
    """

    def __init__(self, packed: PackedWeight, parts: Sequence[PackedLinear], stash: Stash) -> None:
        self.packed = packed
        self._stash = stash
        self._last = len(parts) - 1
        self.is_fused = True
        first = 0
        self._columns: list[slice] = []
        for part in parts:
            self._columns.append(slice(first, first + part.packed.columns))
            first += num_panels(part.packed.columns) * PANEL
        self.bias = None
        if any(part.bias is not None for part in parts):
            self.bias = torch.zeros(packed.columns)
            for part, columns in zip(parts, self._columns, strict=True):
                if part.bias is not None:
                    self.bias[columns] = part.bias

    def multiply(self, index: int, part: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
        """Return the product of one part: [..., its columns]."""
        if not self.is_fused:
            return part.packed.multiply(rows, part.bias)
        if index == 0:
            output = self.packed.multiply(rows, self.bias)
            self._stash.content = (self, rows, output)
            return output[..., self._columns[0]]
        content = self._stash.content
        if content is None or content[0] is not self or content[1] is not rows:
            self.is_fused = False
            self._stash.content = None
            return part.packed.multiply(rows, part.bias)
        if index == self._last:
            self._stash.content = None
        return content[2][..., self._columns[index]]


class Stash:
    """The input and the result of the fused product that ran last; one of a model."""

    def __init__(self) -> None:
        self.content: tuple[FusedProduct, torch.Tensor, torch.Tensor] | None = None


class FusedLinear(PackedLinear):
    """One linear layer of several that are computed together."""

    _fused: tuple[FusedProduct, int] | None = None

    def join(self, product: FusedProduct, index: int) -> None:
        """Make this layer the part of that number of a product."""
        self._fused = (product, index)

    @property
    def product(self) -> FusedProduct | None:
        """The product that this layer is part of."""
        return None if self._fused is None else self._fused[0]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [..., columns] of [..., depth]."""
        if self._fused is None:
            return super().forward(rows)
        product, index = self._fused
        return product.multiply(index, self, rows)


class PackedEmbedding(PackedModule):
    """Stands for an embedding: reads its rows from the packed form, which a tied head may share."""

    def __init__(self, packed: PackedWeight, original: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(packed, original, dtype)
        self._dtype = dtype
        self._is_scaled = type(original) is not nn.Embedding

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return [..., hidden size] of [...] token ids."""
        rows = self.packed.rows(token_ids).to(self._dtype)
        if self._is_scaled:
            rows *= self.original.get_buffer("embed_scale").to(self._dtype)
        return rows
