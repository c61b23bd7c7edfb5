"""Products with packed weights against float64, with every instruction set."""

from __future__ import annotations

import pytest
import torch

from cbgen.engine.cpu.native import Kernels
from cbgen.engine.cpu.packed import PackedWeight

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = (
    # rows, columns, depth
    (1, 1, 1),
    (1, 32, 16),
    (5, 31, 37),
    (4, 64, 64),
    (7, 100, 48),
    (13, 33, 2050),
    (25, 96, 40),
    (130, 160, 64),
)


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def weight_of(columns: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    return (randn(columns, depth, seed=columns) * 0.1).to(dtype)


def largest_error(product: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> float:
    """Return the error of a product as a share of the sum of its absolute terms."""
    wanted = rows.double() @ weight.double().t()
    scale = rows.double().abs() @ weight.double().abs().t()
    return float(((product - wanted).abs() / scale).max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_that_of_the_unpacked_weight(kernels: Kernels, shape, dtype):
    num_rows, columns, depth = shape
    weight, rows = weight_of(columns, depth, dtype), randn(num_rows, depth)
    product = PackedWeight.pack(weight, kernels).multiply(rows)
    assert product.shape == (num_rows, columns)
    assert largest_error(product, rows, weight) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_bits_in_any_batch_and_place(kernels: Kernels, dtype):
    packed = PackedWeight.pack(weight_of(100, 2100, dtype), kernels)
    rows = randn(40, 2100)
    together = packed.multiply(rows)
    for size in range(1, 41):
        assert torch.equal(packed.multiply(rows[-size:]), together[-size:])


def test_a_row_is_the_same_bits_on_any_number_of_threads(kernels: Kernels, threads):
    packed, rows = PackedWeight.pack(weight_of(500, 64, torch.bfloat16), kernels), randn(300, 64)
    torch.set_num_threads(1)
    alone = packed.multiply(rows)
    torch.set_num_threads(3)
    assert torch.equal(packed.multiply(rows), alone)


def test_the_vector_kernels_agree_bit_for_bit(library: Kernels):
    if "avx2" not in library.instruction_sets():
        pytest.skip("one instruction set with fused multiply-adds at most")
    packed, rows = PackedWeight.pack(weight_of(70, 90, torch.bfloat16), library), randn(20, 90)
    products = []
    for name in library.instruction_sets()[:-1]:
        with library.using(name):
            products.append(packed.multiply(rows))
    assert all(torch.equal(product, products[0]) for product in products)


def test_a_bias_is_added(kernels: Kernels):
    weight, rows, bias = weight_of(45, 20, torch.float32), randn(9, 20), randn(45)
    packed = PackedWeight.pack(weight, kernels)
    torch.testing.assert_close(packed.multiply(rows, bias), packed.multiply(rows) + bias)


def test_rows_may_be_a_slice_of_wider_ones(kernels: Kernels):
    packed, wide = PackedWeight.pack(weight_of(40, 20, torch.float32), kernels), randn(6, 50)
    rows = wide[:, 7:27]
    assert torch.equal(packed.multiply(rows), packed.multiply(rows.contiguous()))


def test_nothing_is_written_beside_the_output(kernels: Kernels):
    packed = PackedWeight.pack(weight_of(37, 20, torch.float16), kernels)
    output = torch.full((15, 64), 7.0)
    kernels.linear(randn(15, 20), packed.panels, bias=None, output=output[:, :37])
    assert bool((output[:, 37:] == 7.0).all())


def test_no_rows_are_a_product_of_no_rows(kernels: Kernels):
    packed = PackedWeight.pack(weight_of(37, 20, torch.float32), kernels)
    assert packed.multiply(torch.empty(0, 20)).shape == (0, 37)


def test_rows_of_other_dtypes_are_multiplied_in_float32(kernels: Kernels):
    packed = PackedWeight.pack(weight_of(37, 20, torch.float32), kernels)
    rows = randn(2, 3, 20).bfloat16()
    product = packed.multiply(rows)
    assert product.dtype == torch.bfloat16
    assert torch.equal(product, packed.multiply(rows.float()).bfloat16())


def test_a_row_that_is_not_a_number_leaves_the_others_alone(kernels: Kernels):
    packed, rows = PackedWeight.pack(weight_of(64, 20, torch.float32), kernels), randn(14, 20)
    wanted = packed.multiply(rows)
    rows[3, 5] = float("nan")
    product = packed.multiply(rows)
    assert bool(product[3].isnan().all())
    assert torch.equal(product[torch.arange(14) != 3], wanted[torch.arange(14) != 3])


SPECIAL_VALUES = (0.0, -0.0, 1.0, -2.5, 65504.0, 2.0**-14, 2.0**-24, -(2.0**-20), 3 * 2.0**-24)


@pytest.mark.parametrize("values", [SPECIAL_VALUES, (float("inf"), -float("inf"))], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packing_keeps_every_bit(library: Kernels, values, dtype):
    weight = torch.tensor([values]).to(dtype)
    packed = PackedWeight.pack(weight, library, dtype)
    assert torch.equal(
        packed.unpack(torch.float32).view(torch.int32), weight.float().view(torch.int32)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_float32_weight_is_packed_in_the_smallest_exact_dtype(library: Kernels, dtype):
    weight = weight_of(50, 40, dtype).float()
    assert PackedWeight.pack(weight, library).panels.dtype == dtype


def test_one_value_decides_that_a_weight_stays_float32(library: Kernels):
    weight = weight_of(50, 40, torch.bfloat16).float()
    weight[49, 39] = 1 / 3
    assert PackedWeight.pack(weight, library).panels.dtype == torch.float32


@pytest.mark.parametrize("value", [65536.0, 2.0**-25, 1 + 2.0**-11], ids=str)
def test_what_float16_cannot_hold_is_not_packed_in_it(library: Kernels, value):
    weight = torch.tensor([[1 + 2.0**-10, value, 1 / 4]])  # the first is too fine for bfloat16
    assert library.exact_dtype(weight) == torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_in_columns_is_packed_as_one_in_rows(library: Kernels, dtype):
    weight = weight_of(70, 130, dtype)
    panels = PackedWeight.pack(weight, library).panels
    in_columns = weight.t().contiguous().t()
    assert torch.equal(PackedWeight.pack(in_columns, library).panels, panels)


def test_rows_of_a_packed_weight_are_read_back_in_any_order(library: Kernels):
    weight = weight_of(70, 9, torch.bfloat16)
    indices = torch.tensor([[69, 0], [31, 32]])
    assert torch.equal(PackedWeight.pack(weight, library).rows(indices), weight[indices].float())


def test_a_row_outside_of_the_weight_is_refused(library: Kernels):
    packed = PackedWeight.pack(weight_of(70, 9, torch.bfloat16), library)
    with pytest.raises(IndexError, match="70 rows"):
        packed.rows(torch.tensor([70]))
