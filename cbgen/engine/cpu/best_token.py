"""Finds the best token of a hidden state without computing most of its logits.

The head of a model is multiplied in int8, several times as fast as exactly, with a bound of what
rounding can have changed in each product. Tokens whose bound is below a logit that was computed
exactly cannot be the best. The few panels of the others are computed exactly, by the same products
as all logits would be, so the outcome is that of all logits, bit for bit.
"""

from __future__ import annotations

import math
import time

import torch
from transformers import PreTrainedModel

from cbgen.engine.cpu.decoder_layers import ModelParts, is_known
from cbgen.engine.cpu.linears import PackedLinear
from cbgen.engine.cpu.native import PANEL, BestColumns, Kernels, panel_shape
from cbgen.engine.cpu.packed import PackedWeight, num_panels

_CHUNK_ROWS = 128 * PANEL
"""Weights that are rounded at once."""
_ROUNDED_UP = 1 + 2.0**-10
"""More than the relative error of a length that is computed in float32."""
_ROUNDINGS = 64
"""Beside those of a sum over the depth: in rotating and scaling rows and weights, and in bounds."""
_SHORTEST = 1e-36
"""Added to lengths, because float32 holds shorter ones with few bits or none."""
_LONGEST = 1e6
"""Length of a token's weights up to which logits of rows that csrc/screen.h bounds are finite."""


class HeadScreen:
    """The weights of a head once more, in int8, and how far they are from the exact ones."""

    def __init__(self, exact: PackedWeight, rounded: torch.Tensor, errors: torch.Tensor) -> None:
        self._exact = exact
        self._rounded = rounded
        self._errors = errors
        self._seconds = 0.0

    @classmethod
    def of(cls, parts: ModelParts, kernels: Kernels) -> HeadScreen | None:
        """Round the head of a model; None if it has a bias, or is not packed with finite values."""
        head = parts.head
        if not isinstance(head, PackedLinear) or head.bias is not None or head.packed.is_rounded:
            return None
        exact = head.packed
        rounded = torch.empty(panel_shape(exact.columns, exact.depth, torch.int8), dtype=torch.int8)
        errors = torch.zeros(num_panels(exact.columns), 2, PANEL)
        for first in range(0, exact.columns, _CHUNK_ROWS):
            indices = torch.arange(first, min(exact.columns, first + _CHUNK_ROWS))
            panels = slice(first // PANEL, first // PANEL + num_panels(len(indices)))
            wanted = exact.rows(indices)
            kernels.pack(wanted, rounded[panels])
            lengths = _lengths(wanted, rounded[panels], kernels)
            if not bool((lengths < _LONGEST).all()):
                return None
            padding = (0, len(errors[panels]) * PANEL - len(indices))
            padded = torch.nn.functional.pad(lengths, padding)
            errors[panels] = padded.view(2, -1, PANEL).transpose(0, 1)
        return cls(exact, rounded, errors)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes beside the exact weights."""
        return sum(each.numel() * each.element_size() for each in (self._rounded, self._errors))

    def best(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best logit of each row and its token, as `Scores.best` does.

        Args:
            hidden: [rows, depth] float32 contiguous.
        """
        started = time.perf_counter()
        places = torch.empty(len(hidden), dtype=torch.long)
        values = torch.empty(len(hidden))
        linear = self._exact.argument(None)
        linear.input = hidden.data_ptr()
        linear.rows = len(hidden)
        linear.input_stride = hidden.stride(0)
        arguments = BestColumns(
            linear=linear,
            rounded=self._rounded.data_ptr(),
            errors=self._errors.data_ptr(),
            places=places.data_ptr(),
            values=values.data_ptr(),
        )
        self._exact.kernels.best_columns(arguments)
        self._seconds += time.perf_counter() - started
        return values, places

    def take_seconds(self) -> float:
        """Return the seconds that it took since the last time this was asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def screen_bytes(model: PreTrainedModel) -> int:
    """Return the memory of the screen that the head of a model will have, if it is packed.

    Args:
        model: as it was made; it may be on the meta device.
    """
    head = model.get_output_embeddings()
    if not is_known(model) or head is None:
        return 0
    columns, depth = head.get_parameter("weight").shape
    rounded = math.prod(panel_shape(columns, depth, torch.int8))
    return rounded + num_panels(columns) * 2 * PANEL * torch.float32.itemsize


def _lengths(wanted: torch.Tensor, panels: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Return how long what rounding took from each weight is, and the rounded weight, at least.

    What float32 loses in the exact products and in the bounds counts as lost by rounding.

    Args:
        wanted: [n, depth] float32.
        panels: the same weights in int8.
        kernels: the library.

    Returns:
        [2, n] float32.
    """
    rounded = torch.empty_like(wanted)
    kernels.unpack_rows(panels, torch.arange(len(wanted)), rounded)
    slack = (wanted.shape[1] + _ROUNDINGS) * torch.finfo(torch.float32).eps
    lost = _length(wanted - rounded) + slack * _length(wanted)
    return (torch.stack([lost, _length(rounded)]) * _ROUNDED_UP).float() + _SHORTEST


def _length(rows: torch.Tensor) -> torch.Tensor:
    """Return the length of each row, [n] float64: in float32 squares of small numbers are 0."""
    lengths: torch.Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return lengths
