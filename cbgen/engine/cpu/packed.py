"""Packed weights: their form, the memory that they lie in, and the check against the original.

A packed weight keeps every value exactly, in the smallest of bfloat16, float16 and float32 that
can, or rounds them to int8; what goes in and comes out is float32 whatever the weights are. Weights
are read once a step from end to end; with memory pages of 4 KiB much of that time goes into finding
them, so they lie in large pieces that ask the system for huge pages (Linux gives them only to those
who ask, and torch does not).
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from cbgen.engine.cpu.native import PACKED_FORMATS, PANEL, Kernels, Linear, panel_shape
from cbgen.errors import EngineError

_UNPACK_ROWS = 4096
_CHECKED_COLUMNS = 32
_CHECKED_ROWS = 3
_TOLERANCE = 1e-5
"""Largest difference from torch's product, as a share of the sum of absolute terms."""
_INT8_TOLERANCE = 0.03
"""Of rows that are rounded to int8: the root mean square of the differences, as a share of that of
the products. The values of random rows lie within some three deviations, which are 127 steps wide,
so rounding makes 3 / 127 / sqrt(12) = 0.007."""
_INT8_STEPS = 127
_PIECE_BYTES = 64 * 2**20
_ALIGNMENT = 64


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
        memory: WeightMemory | None = None,
    ) -> PackedWeight:
        """Pack a weight.

        Args:
            weight: [columns, depth] float32, bfloat16 or float16, strided in any way.
            kernels: the library.
            dtype: one that holds every value exactly, or int8; None = the smallest such.
            memory: where the packed form lies; None = in memory of its own.
        """
        dtype = dtype or kernels.exact_dtype(weight)
        return cls.pack_side_by_side([weight], kernels, dtype, memory)[0]

    @classmethod
    def pack_side_by_side(
        cls,
        weights: Sequence[torch.Tensor],
        kernels: Kernels,
        dtype: torch.dtype,
        memory: WeightMemory | None = None,
    ) -> tuple[PackedWeight, list[PackedWeight]]:
        """Pack weights of one depth so that one product computes them all.

        Args:
            weights: as in `pack`.
            kernels: the library.
            dtype: as in `pack`.
            memory: as in `pack`.

        Returns:
            All of them as one weight, in which each begins with a panel of its own, and each.
        """
        depth = weights[0].shape[1]
        counts = [num_panels(weight.shape[0]) for weight in weights]
        shape = panel_shape(sum(counts) * PANEL, depth, dtype)
        panels = torch.empty(shape, dtype=dtype) if memory is None else memory.empty(shape, dtype)
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


def first_columns(weights: Sequence[PackedWeight]) -> list[int]:
    """Return the first column of each of some weights that lie side by side, panel by panel."""
    counts = [num_panels(weight.columns) * PANEL for weight in weights[:-1]]
    return [*accumulate(counts, initial=0)]


class WeightMemory:
    """Hands out tensors side by side; a piece is freed with the last tensor in it.

    Memory is handed out by the system when it is written, so what is left of a piece costs nothing.
    Before each piece, what was freed goes back to the system: the originals of packed weights.
    """

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor of any content, on the CPU, aligned to a cache line."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._used + num_bytes > len(self._piece):
            give_back()
            self._piece = _huge_pages(max(_PIECE_BYTES, num_bytes + _ALIGNMENT))
            self._used = -self._piece.data_ptr() % _ALIGNMENT
        taken = self._piece[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return taken.view(dtype).view(shape)


def give_back() -> None:
    """Have the C library return freed memory to the system, which it keeps otherwise (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _huge_pages(num_bytes: int) -> torch.Tensor:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def check_packed(matrix: torch.Tensor, packed: PackedWeight) -> None:
    """Compare some columns of a packed weight and of its product with the original.

    Args:
        matrix: [columns, depth], the original.
        packed: its packed form.

    Raises:
        EngineError: they differ by more than rounding.
    """
    columns, depth = matrix.shape
    some = torch.linspace(0, columns - 1, min(_CHECKED_COLUMNS, columns)).long()
    wanted = matrix[some].float()
    generator = torch.Generator().manual_seed(columns)
    rows = torch.randn(_CHECKED_ROWS, depth, generator=generator)
    product, unpacked = packed.multiply(rows)[:, some], packed.rows(some)
    is_right = _is_int8_right if packed.is_rounded else _is_exact
    if not is_right(wanted, unpacked, rows, product):
        raise EngineError(
            f"a packed weight of shape {tuple(matrix.shape)} does not compute what the original "
            f"does with the {packed.kernels.selected()} kernels; CBGEN_INSTRUCTION_SET=portable "
            "avoids them"
        )


def _is_exact(
    wanted: torch.Tensor, unpacked: torch.Tensor, rows: torch.Tensor, product: torch.Tensor
) -> bool:
    bound = _TOLERANCE * (rows.abs() @ wanted.abs().t()) + torch.finfo(torch.float32).tiny
    difference = (product - rows @ wanted.t()).abs()
    return torch.equal(unpacked, wanted) and bool((difference <= bound).all())


def _is_int8_right(
    wanted: torch.Tensor, unpacked: torch.Tensor, rows: torch.Tensor, product: torch.Tensor
) -> bool:
    # No value is rounded by more than half a step, and a step is at most the row's length over 127.
    bound = math.sqrt(wanted.shape[1] + 64) / (2 * _INT8_STEPS) * wanted.norm(dim=1)
    if not bool(((unpacked - wanted).norm(dim=1) <= bound).all()):
        return False
    exact = rows @ unpacked.t()
    return bool((product - exact).norm() <= _INT8_TOLERANCE * exact.norm())
