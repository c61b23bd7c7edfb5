"""The largest number of a row: its first place, as a search one by one finds it."""

from __future__ import annotations

import math

import pytest
import torch

from cbgen.engine.cpu.native import Kernels

SIZES = (1, 3, 16, 63, 64, 65, 1023, 1024, 1025, 2048, 5000, 49_153)


def first_largest(row: list[float]) -> int:
    for place, value in enumerate(row):
        if math.isnan(value):
            return place
    return row.index(max(row))


def assert_found(kernels: Kernels, rows: torch.Tensor) -> None:
    assert kernels.largest(rows).tolist() == [first_largest(row) for row in rows.tolist()]


@pytest.mark.parametrize("size", SIZES)
def test_the_first_of_equal_numbers_is_found(kernels: Kernels, size):
    torch.manual_seed(size)
    assert_found(kernels, torch.randn(5, size))
    assert_found(kernels, torch.randint(-3, 1, (9, size)).float())
    assert_found(kernels, torch.full((2, size), -math.inf))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_stands_out_is_found_wherever_it_is(kernels: Kernels, size, value):
    torch.manual_seed(size)
    places = {0, size - 1, size // 2, *torch.randint(size, (9,)).tolist()}
    rows = torch.randn(len(places), size)
    for row, place in zip(rows, places, strict=True):
        row[place] = value
    assert_found(kernels, rows)
    rows[:, -1] = math.nan
    assert_found(kernels, rows)


def test_rows_may_lie_apart(kernels: Kernels):
    rows = torch.randn(7, 300)[:, 20:270]
    assert_found(kernels, rows)


def test_no_rows_have_no_places(library: Kernels):
    assert library.largest(torch.empty(0, 10)).tolist() == []
