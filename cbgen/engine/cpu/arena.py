"""Memory for packed weights: large pieces that ask the system for huge pages.

Weights are read once a step from end to end; with pages of 4 KiB much of that time goes into
finding them (Linux gives huge pages only to those who ask, and torch does not).
"""

from __future__ import annotations

import ctypes
import math
import mmap

import torch

_PIECE_BYTES = 64 * 2**20
_ALIGNMENT = 64


class Arena:
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
