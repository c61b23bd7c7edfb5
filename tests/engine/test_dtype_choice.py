"""`model.dtype: auto` is decided by device, checkpoint, kernels, memory and a measurement."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

from cbgen.engine.config import ModelConfig
from cbgen.engine.cpu import native
from cbgen.engine.cpu.int8 import weight_bytes
from cbgen.engine.model import dtype as deciding
from cbgen.engine.model.dtype import choose_dtype, measure_bfloat16
from cbgen.engine.model.loader import load_model, load_skeleton
from tests.helpers.models import tiny_model

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

needs_kernels = pytest.mark.skipif(native.kernels() is None, reason="the kernels are not built")


def never_made():
    raise AssertionError("sizes do not matter here")


def choose(checkpoint, name="auto", device=CPU, **options):
    return choose_dtype(name, device, checkpoint, lambda: tiny_model("llama"), **options)


@pytest.fixture
def measured(monkeypatch):
    """Pretend that there are kernels, and what bfloat16 gains over them."""

    def pretend(*speedups: float) -> None:
        monkeypatch.setattr(native, "kernels", lambda: "kernels")
        monkeypatch.setattr(deciding, "measure_bfloat16", lambda kernels: list(speedups))

    return pretend


@pytest.mark.parametrize(
    ("name", "device", "checkpoint", "expected"),
    [
        ("float16", CPU, BF16, F16),
        ("bfloat16", CPU, F32, BF16),
        ("auto", CPU, F32, F32),
        ("auto", CPU, None, F32),
        ("auto", GPU, BF16, BF16),
        ("auto", GPU, None, F32),
    ],
)
def test_most_dtypes_need_neither_sizes_nor_a_measurement(name, device, checkpoint, expected):
    assert choose_dtype(name, device, checkpoint, never_made).dtype is expected


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [((0.5, 0.5), F32), ((3.0, 1.2), F32), ((1.2, 3.0), F32), ((2.0, 3.0), BF16)],
)
def test_bfloat16_is_taken_if_it_is_clearly_faster_with_few_rows_and_many(
    measured, speedups, expected
):
    measured(*speedups)
    choice = choose(BF16)
    assert choice.dtype is expected
    assert (
        choice.reason == f"bfloat16 was measured {speedups[0]:g} and {speedups[1]:g} times as fast"
    )


def test_a_float16_checkpoint_computes_in_float32_whatever_is_fast(measured):
    measured(9.0, 9.0)
    assert choose(F16).dtype is F32


@pytest.mark.parametrize(("share", "expected"), [(0.9, BF16), (1.1, F32)])
def test_without_kernels_memory_decides(monkeypatch, share, expected):
    needed = weight_bytes(tiny_model("llama"), F32, F32)
    monkeypatch.setattr(native, "kernels", lambda: None)
    monkeypatch.setattr(deciding, "free_ram", lambda: share * needed / 0.6)
    assert choose(BF16).dtype is expected


@pytest.mark.parametrize(("is_random", "expected"), [(False, F32), (True, BF16)])
def test_with_kernels_the_packed_form_is_what_must_fit(measured, monkeypatch, is_random, expected):
    measured(0.5, 0.5)
    unpacked = weight_bytes(tiny_model("llama"), F32, F32)
    monkeypatch.setattr(deciding, "free_ram", lambda: 0.7 * unpacked / 0.6)
    assert choose(BF16, is_random=is_random).dtype is expected


def test_experts_count_as_float32_and_linear_layers_with_16_bits():
    model = tiny_model("qwen2_moe")
    linears = [m for m in model.modules() if type(m) in (torch.nn.Linear, torch.nn.Embedding)]
    num_kept = sum(module.weight.numel() for module in linears)
    num_all = sum(parameter.numel() for parameter in model.parameters())
    assert weight_bytes(model, F32, BF16) == 4 * num_all - 2 * num_kept
    assert weight_bytes(model, F32, F32) == 4 * num_all


@needs_kernels
def test_the_measurement_compares_few_rows_and_many():
    speedups = measure_bfloat16(native.kernels())
    assert len(speedups) == 2
    assert all(speedup > 0 for speedup in speedups)


@needs_kernels
def test_the_measurement_leaves_the_number_of_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        measure_bfloat16(native.kernels())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@needs_kernels
@pytest.mark.parametrize("load", [load_model, load_skeleton])
def test_a_loaded_model_and_a_planned_one_have_the_choice_and_why(
    load, tmp_path, monkeypatch, caplog
):
    copy.deepcopy(tiny_model("llama")).to(BF16).save_pretrained(tmp_path)
    monkeypatch.setattr(deciding, "measure_bfloat16", lambda kernels: [2.0, 2.0])
    with caplog.at_level(logging.INFO):
        loaded = load(ModelConfig(path=str(tmp_path), device="cpu"))
    assert (loaded.dtype, loaded.model.dtype) == (BF16, BF16)
    assert loaded.dtype_reason == "bfloat16 was measured 2 and 2 times as fast"
    assert "model.dtype auto is bfloat16: bfloat16 was measured" in caplog.text


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "random_init", "expected"),
    [("float32", False, BF16), ("bfloat16", False, BF16), ("float32", True, F32)],
)
def test_what_weights_will_keep_is_known_without_them(tmp_path, dtype, random_init, expected):
    copy.deepcopy(tiny_model("llama")).to(BF16).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), device="cpu", dtype=dtype, random_init=random_init)
    assert load_skeleton(config).packed_dtype is expected


def test_weights_of_32_bits_keep_them(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    assert load_skeleton(ModelConfig(path=str(tmp_path), device="cpu")).packed_dtype is F32
