"""The bound of `cbgen bench`: what is counted, by hand."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from cbgen.bench import roofline
from cbgen.bench.roofline import (
    LinearSizes,
    MachineRates,
    StepWork,
    attention_work,
    linear_sizes,
    measure_machine,
    roofline_seconds,
)
from cbgen.engine.cache.groups import AttentionSpan, LayerFacts
from cbgen.engine.cpu import native
from cbgen.engine.cpu.fusing import fuse_decoder
from cbgen.engine.cpu.linears import pack_linears
from cbgen.engine.model.probe import ModelFacts
from tests.helpers.models import random_model, tiny_config, tiny_model

CPU = torch.device("cpu")
LAYER = LayerFacts(index=0, num_heads=3, num_kv_heads=1, key_dim=2, value_dim=4)
SIZES = LinearSizes(body=100, head=10, total=1000)
NEVER = 1e30
"""A rate at which nothing takes time."""


def make_facts(*layers: LayerFacts) -> ModelFacts:
    return ModelFacts(
        model_type="made up",
        layers=layers,
        vocab_size=10,
        logits_size=10,
        hidden_size=1,
        max_context=None,
        dtype=torch.float32,
        device=CPU,
        weight_bytes=2 * SIZES.total,  # two bytes a weight
    )


def bound(*steps: StepWork, flop_per_s: float = NEVER, bytes_per_s: float = NEVER) -> float:
    facts = make_facts(LAYER)
    return roofline_seconds(steps, SIZES, facts, MachineRates(flop_per_s, bytes_per_s))


def test_products_of_body_head_and_attention_are_counted():
    step = StepWork(spans=((0, 2), (5, 6)), num_logits=1)
    # Keys seen: 1 + 2 of the prompt, 6 of the decoding request.
    flop = 2 * 100 * 3 + 2 * 10 + 2 * 3 * (2 + 4) * (3 + 6)
    assert bound(step, flop_per_s=1.0) == pytest.approx(flop)


def test_weights_are_read_once_a_step_and_keys_once_a_request():
    step = StepWork(spans=((0, 2), (5, 6)), num_logits=1)
    num_bytes = 2 * (100 + 10) + 1 * (2 + 4) * 4 * (2 + 6)
    assert bound(step, bytes_per_s=1.0) == pytest.approx(num_bytes)
    assert bound(step, step, bytes_per_s=1.0) == pytest.approx(2 * num_bytes)


def test_the_head_is_not_read_where_no_token_is_drawn():
    with_head, without = (StepWork(((0, 2),), num_logits=count) for count in (1, 0))
    difference = bound(with_head, bytes_per_s=1.0) - bound(without, bytes_per_s=1.0)
    assert difference == pytest.approx(2 * 10)


def test_a_screened_head_is_counted_as_its_int8_products():
    step = StepWork(spans=((0, 2),), num_logits=8)
    sizes = replace(SIZES, screen_bytes=30)
    facts = replace(make_facts(), weight_bytes=2 * SIZES.total + 30)
    flop = roofline_seconds([step], sizes, facts, MachineRates(1.0, NEVER))
    assert flop == pytest.approx(2 * 100 * 2 + 2 * 10 * 8 / 4)
    num_bytes = roofline_seconds([step], sizes, facts, MachineRates(NEVER, 1.0))
    assert num_bytes == pytest.approx(2 * 100 + 30)


def test_each_step_takes_the_longer_of_both():
    prefill, decode = StepWork(((0, 50),), 1), StepWork(((50, 51),), 1)
    rates = {"flop_per_s": 10.0, "bytes_per_s": 1.0}
    assert bound(prefill, **rates) == bound(prefill, flop_per_s=10.0)
    assert bound(decode, **rates) == bound(decode, bytes_per_s=1.0)
    assert bound(prefill, decode, **rates) == bound(prefill, **rates) + bound(decode, **rates)


@pytest.mark.parametrize(
    "span", [AttentionSpan(), AttentionSpan(window=3), AttentionSpan(chunk=4)], ids=str
)
def test_attention_counts_what_each_query_sees(span):
    spans = ((0, 9), (5, 6), (6, 11))
    pairs = keys = 0
    for start, end in spans:
        seen = [set(range(span.first_key(query), query + 1)) for query in range(start, end)]
        pairs += sum(map(len, seen))
        keys += len(set().union(*seen))
    assert attention_work(span, spans) == (pairs, keys)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_linear_layers_of_a_model_are_counted(name):
    model = tiny_model(name)
    inside = sum(
        weight.numel()
        for path, weight in model.named_parameters()
        if weight.dim() == 2 and not any(part in path for part in ("embed", "wte", "wpe", "head"))
    )
    head = 128 * 32  # vocabulary and hidden size
    total = sum(weight.numel() for weight in model.parameters())
    assert linear_sizes(model) == LinearSizes(body=inside, head=head, total=total)


def test_the_screen_of_a_fused_model_is_counted():
    library = native.kernels()
    if library is None:
        pytest.skip("the kernels are not built")
    model = copy.deepcopy(tiny_model("llama"))
    pack_linears(model, library)
    assert fuse_decoder(model, library)
    sizes = linear_sizes(model)
    assert sizes is not None
    assert sizes.screen_bytes == 128 * 64 + 128 * (4 + 8)  # 32 channels are padded to 64
    assert replace(sizes, screen_bytes=0) == linear_sizes(tiny_model("llama"))


def test_mixtures_of_experts_are_not_counted():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = tiny_config("llama").to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = MixtralConfig(**{name: sizes[name] for name in names}, num_local_experts=2)
    assert linear_sizes(random_model(MixtralForCausalLM, config)) is None


def test_the_machine_is_measured_with_all_that_was_multiplied_and_read(monkeypatch):
    monkeypatch.setattr(roofline, "_SIDE", {"cpu": 16})
    monkeypatch.setattr(roofline, "_READ_BYTES", {"cpu": 4096})
    monkeypatch.setattr(roofline, "_best_seconds", lambda run, device: (run(), 0.5)[1])
    monkeypatch.setattr(roofline, "_register_rate", lambda device, dtype: 0.0)
    rates = measure_machine(CPU, torch.float32)
    assert rates == MachineRates(flop_per_s=2 * 16**3 / 0.5, bytes_per_s=4096 / 0.5)


def test_the_machine_is_as_fast_as_its_registers_where_a_matrix_product_is_not(monkeypatch):
    monkeypatch.setattr(roofline, "_SIDE", {"cpu": 16})
    monkeypatch.setattr(roofline, "_READ_BYTES", {"cpu": 4096})
    monkeypatch.setattr(roofline, "_register_rate", lambda device, dtype: 1e30)
    assert measure_machine(CPU, torch.float32).flop_per_s == 1e30
