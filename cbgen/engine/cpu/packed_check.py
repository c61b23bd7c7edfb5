"""Compares a packed weight with the original, before that is freed."""

from __future__ import annotations

import math

import torch

from cbgen.engine.cpu.packed import PackedWeight
from cbgen.errors import EngineError

_CHECKED_COLUMNS = 32
_CHECKED_ROWS = 3
_TOLERANCE = 1e-5
"""Largest difference from torch's product, as a share of the sum of absolute terms."""
_INT8_TOLERANCE = 0.03
"""Of rows that are rounded to int8: the root mean square of the differences, as a share of that of
the products. The values of random rows lie within some three deviations, which are 127 steps wide,
so rounding makes 3 / 127 / sqrt(12) = 0.007."""
_INT8_STEPS = 127


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
