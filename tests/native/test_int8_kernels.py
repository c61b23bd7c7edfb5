"""Products with int8 weights against exact integer arithmetic, with every instruction set.

The reference rotates, rounds and multiplies as csrc/kernels.h says, in torch; all bits must agree.
"""

from __future__ import annotations

import math

import pytest
import torch

from cbgen.engine.cpu.native import Kernels
from cbgen.engine.cpu.packed import PackedWeight, WeightMemory, check_packed
from cbgen.errors import EngineError

ROTATION = 64
SHAPES = (
    # rows, columns, depth
    (1, 1, 1),
    (1, 32, 64),
    (2, 33, 66),
    (5, 31, 37),
    (12, 64, 128),
    (13, 100, 130),
    (25, 96, 576),
    (70, 160, 63),
)


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def pack(weight: torch.Tensor, kernels: Kernels) -> PackedWeight:
    return PackedWeight.pack(weight, kernels, torch.int8)


def rotated(matrix: torch.Tensor) -> torch.Tensor:
    """Return [n, depth] padded to whole rotations and rotated, in float32, step by step."""
    depth = math.ceil(matrix.shape[1] / ROTATION) * ROTATION
    x = torch.nn.functional.pad(matrix, (0, depth - matrix.shape[1]))
    apart = ROTATION // 2
    while apart:
        low, high = x.view(len(x), -1, 2, apart).unbind(2)
        x = torch.stack([low + high, low - high], 2).view(len(x), depth)
        apart //= 2
    return x


def rounded(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the integers of rotated rows, and the scale of each row."""
    largest = matrix.abs().amax(1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, 0)
    return (matrix * inverse).round().long(), largest / 127


def reference(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    numbers, scales = rounded(rotated(rows))
    weights, weight_scales = rounded(rotated(weight / ROTATION))
    product = (numbers @ weights.t()).float() * scales * weight_scales.t()
    return product if bias is None else product + bias


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_that_of_exact_integers(int8_kernels: Kernels, shape):
    num_rows, columns, depth = shape
    rows, weight = randn(num_rows, depth), randn(columns, depth, seed=1)
    bias = randn(columns, seed=2)
    packed = pack(weight, int8_kernels)
    assert torch.equal(packed.multiply(rows), reference(rows, weight))
    assert torch.equal(packed.multiply(rows, bias), reference(rows, weight, bias))


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_the_largest_values_do_not_saturate(int8_kernels: Kernels, sign):
    one_of_each_64 = torch.zeros(33, 4096)
    one_of_each_64[:, ::ROTATION] = 3.0  # rotated, all 4096 have one magnitude
    product = pack(one_of_each_64, int8_kernels).multiply(sign * one_of_each_64)
    torch.testing.assert_close(product, torch.full((33, 33), sign * 9.0 * ROTATION))


def test_a_row_is_the_same_bits_in_any_batch_and_place(int8_kernels: Kernels):
    packed, rows = pack(randn(100, 200, seed=1), int8_kernels), randn(40, 200)
    together = packed.multiply(rows)
    for size in range(1, 41):
        assert torch.equal(packed.multiply(rows[-size:]), together[-size:])


def test_a_row_is_the_same_bits_on_any_number_of_threads(int8_kernels: Kernels, threads):
    packed, rows = pack(randn(500, 64, seed=1), int8_kernels), randn(700, 64)
    torch.set_num_threads(1)
    alone = packed.multiply(rows)
    torch.set_num_threads(3)
    assert torch.equal(packed.multiply(rows), alone)


def test_no_rows_are_a_product_of_no_rows(int8_kernels: Kernels):
    assert pack(randn(37, 20), int8_kernels).multiply(torch.empty(0, 20)).shape == (0, 37)


@pytest.mark.parametrize("value", [0.0, 1e-38])
def test_rows_of_nothing_give_the_bias(int8_kernels: Kernels, value):
    bias = randn(37)
    product = pack(randn(37, 20), int8_kernels).multiply(torch.full((3, 20), value), bias)
    assert torch.equal(product, bias.expand(3, 37))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("depth", [20, 130])
def test_a_row_that_is_not_finite_becomes_nan_and_leaves_the_others_alone(
    int8_kernels: Kernels, value, depth
):
    packed, rows = pack(randn(64, depth, seed=1), int8_kernels), randn(14, depth)
    wanted = packed.multiply(rows)
    rows[3, depth - 1] = value
    product = packed.multiply(rows)
    assert bool(product[3].isnan().all())
    assert torch.equal(product[torch.arange(14) != 3], wanted[torch.arange(14) != 3])


def test_rows_may_be_a_slice_of_wider_ones(int8_kernels: Kernels):
    packed, wide = pack(randn(40, 70, seed=1), int8_kernels), randn(6, 150)
    rows = wide[:, 7:77]
    assert torch.equal(packed.multiply(rows), packed.multiply(rows.contiguous()))


def test_nothing_is_written_beside_the_output(int8_kernels: Kernels):
    packed = pack(randn(37, 20), int8_kernels)
    output = torch.full((15, 64), 7.0)
    int8_kernels.linear(randn(15, 20), packed.panels, bias=None, output=output[:, :37])
    assert bool((output[:, 37:] == 7.0).all())
    assert bool((output[:, :37] != 7.0).all())


def test_what_stands_out_in_one_depth_does_not_drown_the_others(int8_kernels: Kernels):
    weight, rows = randn(64, 576, seed=1), randn(20, 576)
    rows[:, 5] *= 100
    weight[:, 5] = 0
    wanted = rows @ weight.t()
    error = pack(weight, int8_kernels).multiply(rows) - wanted
    assert error.norm() / wanted.norm() < 0.1  # 0.57 without the rotation


def test_a_product_is_near_that_of_the_original(int8_kernels: Kernels):
    weight, rows = randn(200, 576, seed=1), randn(50, 576)
    wanted = rows @ weight.t()
    error = pack(weight, int8_kernels).multiply(rows) - wanted
    assert error.norm() / wanted.norm() < 0.015


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_weight_of_16_bits_is_packed_as_its_values(library: Kernels, dtype):
    weight = randn(70, 130).to(dtype)
    assert torch.equal(pack(weight, library).panels, pack(weight.float(), library).panels)


def test_a_weight_in_columns_is_packed_as_one_in_rows(library: Kernels):
    weight = randn(70, 130)
    panels = pack(weight.t().contiguous().t(), library).panels
    assert torch.equal(panels, pack(weight, library).panels)


def test_rows_of_a_weight_are_read_back_as_they_were_rounded(library: Kernels):
    weight = randn(70, 130)
    indices = torch.tensor([[69, 0], [31, 32]])
    numbers, scales = rounded(rotated(weight / ROTATION))
    wanted = rotated(numbers.float() * scales)[:, :130]
    assert torch.equal(pack(weight, library).rows(indices), wanted[indices])
    assert torch.equal(pack(weight, library).unpack(torch.float32), wanted)


def test_no_value_of_a_weight_is_rounded_by_more_than_half_a_step(library: Kernels):
    weight = randn(70, 128)
    steps = rotated(weight).abs().amax(1, keepdim=True) / 127
    error = rotated(pack(weight, library).unpack(torch.float32)) - rotated(weight)
    assert bool((error.abs() <= 0.5001 * steps).all())


def test_a_weight_that_is_not_finite_makes_its_column_nan(int8_kernels: Kernels):
    weight = randn(40, 70)
    weight[33, 69] = float("inf")
    product = pack(weight, int8_kernels).multiply(randn(5, 70, seed=1))
    assert bool(product[:, 33].isnan().all())
    assert not bool(product[:, torch.arange(40) != 33].isnan().any())


def test_weights_side_by_side_are_those_of_each(library: Kernels):
    weights, rows = [randn(33, 70, seed=1), randn(64, 70, seed=2)], randn(5, 70)
    whole, parts = PackedWeight.pack_side_by_side(weights, library, torch.int8, WeightMemory())
    product = whole.multiply(rows)
    assert torch.equal(product[:, :33], parts[0].multiply(rows))
    assert torch.equal(product[:, 64:], pack(weights[1], library).multiply(rows))


@pytest.mark.parametrize("damage", ["value", "scale"])
def test_a_damaged_int8_weight_does_not_pass_the_check(library: Kernels, damage):
    weight = randn(64, 128)
    packed = pack(weight, library)
    check_packed(weight, packed)
    values, scales = packed.panels.view(2, -1).split([128 * 32, 32 * 4], dim=1)
    if damage == "value":
        values[:] = values.roll(1, dims=1)
    else:
        scales[:] = scales.roll(4, dims=1)
        scales.view(torch.float32).mul_(1.2)
    with pytest.raises(EngineError, match="does not compute what the original does"):
        check_packed(weight, packed)
