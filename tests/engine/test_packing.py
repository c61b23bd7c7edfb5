"""Models that cbgen loads for a CPU are packed, and only if their answers stay."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

from cbgen.engine.cpu import native, packing
from cbgen.engine.cpu.linears import packed_bytes
from cbgen.engine.cpu.packing import pack_for_cpu
from cbgen.errors import EngineError
from tests.helpers.models import full_logits, tiny_model

needs_kernels = pytest.mark.skipif(native.kernels() is None, reason="the kernels are not built")
TOKENS = [3, 1, 4, 1, 5]


@pytest.fixture
def model():
    """A model of the test's own."""
    return copy.deepcopy(tiny_model("llama"))


@needs_kernels
def test_a_packed_model_computes_the_same_logits(model):
    assert pack_for_cpu(model, torch.float32)
    assert packed_bytes(model) > 0
    wanted = full_logits(tiny_model("llama"), TOKENS)
    assert (full_logits(model, TOKENS) - wanted).abs().max() < 1e-4


def test_a_model_in_another_dtype_is_left_alone(model):
    assert not pack_for_cpu(model.to(torch.bfloat16), torch.bfloat16)
    assert packed_bytes(model) == 0


@needs_kernels
def test_a_layer_that_cannot_be_packed_leaves_the_model_as_it_was(model, monkeypatch, caplog):
    def fail(packed, kernels):
        raise EngineError("a layer of shape (3, 4)")

    monkeypatch.setattr(packing, "pack_linears", fail)
    with caplog.at_level(logging.WARNING):
        assert not pack_for_cpu(model, torch.float32)
    assert "linear layers run on torch: a layer of shape (3, 4)" in caplog.text
    assert torch.equal(full_logits(model, TOKENS), full_logits(tiny_model("llama"), TOKENS))


@needs_kernels
def test_a_model_whose_logits_change_is_unpacked(model, monkeypatch, caplog):
    pack = packing.pack_linears

    def pack_and_damage(packed, kernels):
        pack(packed, kernels)
        packed.model.norm.weight.data.mul_(1.01)

    monkeypatch.setattr(packing, "pack_linears", pack_and_damage)
    with caplog.at_level(logging.WARNING):
        assert not pack_for_cpu(model, torch.float32)
    assert "they change a logit by" in caplog.text
    assert packed_bytes(model) == 0


def test_without_kernels_nothing_is_packed_and_why_is_logged(model, monkeypatch, caplog):
    monkeypatch.setattr(native, "kernels", lambda: None)
    monkeypatch.setattr(native, "why_missing", lambda: "the C++ kernels were not built")
    with caplog.at_level(logging.INFO):
        assert not pack_for_cpu(model, torch.float32)
    assert "linear layers run on torch: the C++ kernels were not built" in caplog.text
