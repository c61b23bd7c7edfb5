"""Best tokens found without all logits are those of all logits, bit for bit."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn

from cbgen.engine.cpu import best_token
from cbgen.engine.cpu.best_token import HeadScreen, screen_bytes
from cbgen.engine.cpu.decoder import find_decoder
from cbgen.engine.cpu.decoder_layers import ModelParts
from cbgen.engine.cpu.fusing import fuse_decoder
from cbgen.engine.cpu.linears import PackedLinear, pack_linears
from cbgen.engine.cpu.native import PANEL, Kernels
from cbgen.engine.cpu.packed import PackedWeight
from cbgen.engine.sampling.scores import Logits
from tests.helpers.models import random_model, tiny_config, tiny_model


def pack_head(
    weight: torch.Tensor, kernels: Kernels, bias: torch.Tensor | None = None
) -> nn.Module:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return PackedLinear(PackedWeight.pack(weight, kernels), linear, torch.float32)


def find_screen(head: nn.Module, kernels: Kernels) -> HeadScreen | None:
    nothing = nn.ModuleList()
    return HeadScreen.of(ModelParts(nothing, nothing, nothing, nothing, head), kernels)


def assert_best(weight: torch.Tensor, rows: torch.Tensor, kernels: Kernels) -> None:
    """Compare with a search in all logits."""
    head = pack_head(weight, kernels)
    screen = find_screen(head, kernels)
    assert screen is not None
    wanted, places = Logits(head(rows)).best()
    found, found_places = screen.best(rows)
    assert torch.equal(found_places, places)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 255, 256, 300, 1000])
@pytest.mark.parametrize("depth", [1, 63, 64, 100, 576])
def test_best_tokens_are_those_of_all_logits(int8_kernels: Kernels, columns, depth):
    torch.manual_seed(columns * depth)
    weight = torch.randn(columns, depth).bfloat16()
    for num_rows in (1, 2, 13, 40):
        assert_best(weight, torch.randn(num_rows, depth), int8_kernels)


@pytest.mark.parametrize("num_rows", [95, 96, 97, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_many_rows_are_searched_in_blocks(int8_kernels: Kernels, num_rows, dtype):
    torch.manual_seed(num_rows)
    assert_best(torch.randn(700, 48).to(dtype), torch.randn(num_rows, 48), int8_kernels)


def test_rows_may_lie_apart(library: Kernels):
    torch.manual_seed(0)
    assert_best(torch.randn(200, 60), torch.randn(9, 80)[:, 10:70], library)


def test_the_first_of_equal_tokens_is_found(int8_kernels: Kernels):
    torch.manual_seed(1)
    # Each weight stands in seven panels, and all logits of the last row are 0.
    weight = torch.randn(PANEL + 5, 70).repeat(7, 1)
    rows = torch.randn(30, 70)
    rows[-1] = 0
    assert_best(weight, rows, int8_kernels)


def test_rounding_never_hides_the_best_token(int8_kernels: Kernels):
    torch.manual_seed(2)
    for _ in range(10):
        large = torch.randn(128)
        rounded = PackedWeight.pack(large[None], int8_kernels, torch.int8).unpack(torch.float32)[0]
        # Along what rounding takes from this weight no product is as wrong as its own.
        row = large - rounded
        exact, wrong = row @ large, row @ rounded
        # A weight in another panel lies between, so that the rounded products prefer the other one.
        weight = -1000 * row.repeat(2 * PANEL, 1)
        weight[3] = large
        weight[PANEL + 5] = row * ((exact + wrong) / 2 / (row @ row))
        assert exact - wrong > 1e-6
        assert (weight @ row).argmax() == 3
        assert_best(weight, row[None], int8_kernels)
        assert_best(-weight, -row[None], int8_kernels)


def test_rounding_of_a_row_never_hides_its_best_token(int8_kernels: Kernels):
    torch.manual_seed(3)
    for _ in range(10):
        row = torch.randn(128)
        rounded = PackedWeight.pack(row[None], int8_kernels, torch.int8).unpack(torch.float32)[0]
        # What rounding took from the row, and a weight whose product is half of that.
        lost, kept = row - rounded, row @ (row - rounded)
        weight = -1000 * row.repeat(2 * PANEL, 1)
        weight[3] = lost
        weight[PANEL + 5] = row * ((kept + rounded @ lost) / 2 / (row @ row))
        assert kept - rounded @ lost > 1e-6
        assert (weight @ row).argmax() == 3
        assert_best(weight, row[None], int8_kernels)


def test_the_order_of_sums_hides_nothing(int8_kernels: Kernels):
    torch.manual_seed(4)
    # Rounding to int8 takes nothing here: the rotation makes 64 equal whole numbers of each. All
    # products are equal but for what float32 makes of the order of their terms.
    numbers = torch.randint(-100, 100, (24,))
    numbers[0] = 127
    weight = torch.zeros(600, 24, 64)
    for token in weight:
        token[:, 0] = 64 * numbers[torch.randperm(24)]
    row = torch.zeros(24, 64)
    row[:, 0] = 1 / 3
    logits = pack_head(weight.flatten(1), int8_kernels)(row.flatten()[None])
    assert len(logits.unique()) > 1
    assert_best(weight.flatten(1), row.flatten()[None], int8_kernels)


def test_tokens_that_differ_in_the_last_bit_are_told_apart(int8_kernels: Kernels):
    torch.manual_seed(3)
    one = torch.randn(96)
    weight = one.repeat(400, 1)
    changed = torch.randint(96, (400,))
    weight[torch.arange(400), changed] *= 1 + 2.0**-22
    assert_best(weight, torch.randn(20, 96), int8_kernels)


@pytest.mark.parametrize("length", [1e-38, 1e-30, 1e-20, 1e20, 1e31, 3e38])
def test_rows_of_any_length_are_searched(int8_kernels: Kernels, length):
    torch.manual_seed(4)
    rows = torch.randn(5, 64)
    rows = rows / rows.abs().amax(dim=1, keepdim=True) * length
    assert_best(torch.randn(100, 64), rows, int8_kernels)
    assert_best(torch.randn(100, 64) * 1e-20, rows, int8_kernels)


@pytest.mark.parametrize("scale", [1e-18, 1e-23, 1e-25, 1e-28, 1e-31, 1e-38, 1e-44])
def test_weights_whose_squares_vanish_are_searched(int8_kernels: Kernels, scale):
    torch.manual_seed(10)
    for length in (1e-8, 1, 1e20):
        rows = torch.randn(40, 64) * length
        assert_best(torch.randn(400, 64) * scale, rows, int8_kernels)
        # All other logits are below 0.
        weight = -torch.rand(400, 64)
        weight[::20] = torch.randn(20, 64) * scale
        assert_best(weight, rows.abs(), int8_kernels)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found(int8_kernels: Kernels, value):
    torch.manual_seed(5)
    rows = torch.randn(9, 64)
    rows[4, 7] = value
    assert_best(torch.randn(100, 64), rows, int8_kernels)


def test_one_large_channel_spoils_nothing(int8_kernels: Kernels):
    torch.manual_seed(6)
    weight, rows = torch.randn(500, 192), torch.randn(25, 192)
    rows[:, 5] *= 1000
    weight[:, 77] *= 100
    assert_best(weight, rows, int8_kernels)


def test_panels_that_cannot_hold_the_best_are_not_computed(int8_kernels: Kernels):
    torch.manual_seed(7)
    weight = torch.randn(64 * PANEL, 256).bfloat16()
    rows = 3 * weight[::100].float() + torch.randn(len(weight[::100]), 256)
    head = pack_head(weight, int8_kernels)
    screen = find_screen(head, int8_kernels)
    assert screen is not None
    wanted, places = Logits(head(rows)).best()
    needed = set((places // PANEL).tolist())
    for panel in range(64):
        if panel not in needed:
            head.packed.panels[panel] = math.nan
    found, found_places = screen.best(rows)
    assert torch.equal(found_places, places)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_change_nothing(library: Kernels, threads, num_threads):
    torch.set_num_threads(num_threads)
    torch.manual_seed(8)
    assert_best(torch.randn(3000, 64), torch.randn(70, 64), library)


def test_no_rows_have_no_best(library: Kernels):
    screen = find_screen(pack_head(torch.randn(40, 8), library), library)
    assert screen is not None
    assert [len(each) for each in screen.best(torch.empty(0, 8))] == [0, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e7])
def test_weights_without_bounds_are_not_screened(library: Kernels, value):
    weight = torch.randn(100, 16)
    weight[70, 3] = value
    assert find_screen(pack_head(weight, library), library) is None


def test_heads_of_other_kinds_are_not_screened(library: Kernels):
    weight = torch.randn(100, 16)
    assert find_screen(pack_head(weight, library, torch.zeros(100)), library) is None
    assert find_screen(nn.Linear(16, 100, bias=False), library) is None
    rounded = pack_head(weight, library)
    rounded.packed = PackedWeight.pack(weight, library, torch.int8)
    assert find_screen(rounded, library) is None


def test_weights_are_rounded_a_piece_at_a_time(library: Kernels, monkeypatch):
    torch.manual_seed(9)
    weight, rows = torch.randn(333, 40), torch.randn(20, 40)
    whole = find_screen(pack_head(weight, library), library)
    monkeypatch.setattr(best_token, "_CHUNK_ROWS", 2 * PANEL)
    pieces = find_screen(pack_head(weight, library), library)
    assert whole is not None
    assert pieces is not None
    assert torch.equal(whole._rounded, pieces._rounded)
    torch.testing.assert_close(whole._errors, pieces._errors, rtol=1e-6, atol=0)
    assert_best(weight, rows, library)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_memory_of_a_screen_is_known_before(library: Kernels, name):
    model = random_model(type(tiny_model(name)), tiny_config(name))
    expected = screen_bytes(model)
    pack_linears(model, library)
    assert fuse_decoder(model, library)
    decoder = find_decoder(model)
    assert decoder is not None
    assert decoder.screen is not None
    assert decoder.screen.num_bytes == expected > 0
    assert screen_bytes(tiny_model("gpt2")) == 0


def test_a_screen_that_finds_other_tokens_is_left_out(library: Kernels, monkeypatch, caplog):
    model = random_model(type(tiny_model("llama")), tiny_config("llama"))
    pack_linears(model, library)
    real = HeadScreen.best
    monkeypatch.setattr(
        HeadScreen, "best", lambda self, hidden: (real(self, hidden)[0], real(self, hidden)[1] ^ 1)
    )
    with caplog.at_level(logging.WARNING):
        assert fuse_decoder(model, library)
    assert "the head's screen finds others" in caplog.text
    decoder = find_decoder(model)
    assert decoder is not None
    assert decoder.screen is None
