"""Planning without weights: the same facts as with them, and the same refusals."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
import transformers

from cbgen.engine import build
from cbgen.engine.build import build_engine, plan_engine
from cbgen.engine.config import ContinuousBatchingConfig, ModelConfig
from cbgen.engine.model.attach import attached
from cbgen.engine.model.loader import load_model, load_skeleton
from cbgen.engine.model.probe import probe_model
from cbgen.errors import UsageError
from tests.helpers.models import EAGER_MODELS, PLAIN_MODELS, tiny_model

BATCHING = ContinuousBatchingConfig(num_blocks=32, page_size=16)
MIXTURE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def save(tmp_path_factory):
    """Save a model, or a config alone, and return its folder."""

    def save_into_folder(content) -> str:
        folder = tmp_path_factory.mktemp("model")
        content.save_pretrained(folder)
        return str(folder)

    return save_into_folder


@pytest.mark.parametrize("name", [*PLAIN_MODELS, *EAGER_MODELS])
def test_facts_and_plan_are_those_of_the_loaded_model(save, name):
    config = ModelConfig(path=save(tiny_model(name)), device="cpu")
    planned = plan_engine(config, BATCHING)
    loaded = load_model(config)
    facts = probe_model(loaded.model)
    # Which format holds the values of a weight exactly is known when they are there.
    assert planned.facts == replace(facts, weight_bytes=planned.facts.weight_bytes)
    assert facts.weight_bytes <= planned.facts.weight_bytes * 1.1  # panels are padded
    with attached(loaded.model):
        built = build_engine(loaded.model, BATCHING)
        assert (planned.plan.cache.num_blocks, planned.plan.max_requests) == (
            built.plan.cache.num_blocks,
            built.plan.max_requests,
        )
        assert planned.plan.attn_implementation == built.plan.attn_implementation
    assert planned.loaded.eos_token_ids == loaded.eos_token_ids
    assert planned.loaded.generation_defaults == loaded.generation_defaults


def test_a_skeleton_has_no_weights(save):
    folder = save(tiny_model("llama"))
    loaded = load_skeleton(ModelConfig(path=folder, device="cpu"))
    assert all(weight.is_meta for weight in loaded.model.parameters())
    assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))


def test_a_config_is_enough(save):
    folder = save(tiny_model("qwen3").config)
    planned = plan_engine(ModelConfig(path=folder, device="cpu", dtype="bfloat16"), BATCHING)
    num_weights = sum(weight.numel() for weight in tiny_model("qwen3").parameters())
    assert planned.facts.weight_bytes == 2 * num_weights


def test_a_16_bit_checkpoint_is_planned_as_it_is_held(save):
    folder = save(copy.deepcopy(tiny_model("llama")).to(torch.bfloat16))
    config = ModelConfig(path=folder, device="cpu", dtype="float32")
    planned = plan_engine(config, BATCHING).facts
    facts = probe_model(load_model(config).model)
    assert planned == replace(facts, weight_bytes=planned.weight_bytes)
    assert 0.8 * facts.weight_bytes <= planned.weight_bytes <= facts.weight_bytes  # less padding


def test_a_mixture_model_is_planned_in_float32(save):
    folder = save(transformers.MixtralConfig(**MIXTURE))
    planned = plan_engine(ModelConfig(path=folder, device="cpu"), BATCHING)
    assert planned.facts.dtype is torch.float32
    assert len(planned.facts.layers) == 2


def test_defaults_and_end_tokens_are_read(save, tmp_path):
    tiny_model("llama").config.save_pretrained(tmp_path)
    defaults = {"temperature": 0.6, "do_sample": True, "eos_token_id": [5, 6]}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    loaded = load_skeleton(ModelConfig(path=str(tmp_path), device="cpu"))
    assert loaded.eos_token_ids == {5, 6}
    assert loaded.generation_defaults["temperature"] == 0.6


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("Bloom", {"n_layer": 2, "n_head": 4}),
        ("Falcon", {"num_hidden_layers": 2, "num_attention_heads": 4}),
        ("Bart", {"d_model": 32, "decoder_layers": 2, "encoder_layers": 2}),
        ("FalconH1", {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_ssm": 64}),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_by_name(save, family, sizes):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2} | sizes
    config = getattr(transformers, f"{family}Config")(**sizes)
    with pytest.raises(UsageError, match=f"model type '{config.model_type}' is not supported"):
        plan_engine(ModelConfig(path=save(config), device="cpu"), BATCHING)


def test_a_missing_model_is_refused():
    with pytest.raises(UsageError, match="there is no such folder"):
        plan_engine(ModelConfig(path="/no/such/folder", device="cpu"), BATCHING)


def test_the_cache_gets_what_the_weights_leave(save, monkeypatch):
    folder = save(tiny_model("llama"))
    config = ModelConfig(path=folder, device="cpu")
    weights = plan_engine(config, BATCHING).facts.weight_bytes
    monkeypatch.setattr(build, "free_bytes", lambda device: 3 * weights)
    planned = plan_engine(config, ContinuousBatchingConfig(page_size=16, max_batch_tokens=16))
    assert planned.plan_facts.free_bytes == 2 * weights
    assert "as memory allows" in " ".join(planned.plan.reasons.values())


def test_weights_that_do_not_fit_are_refused(save, monkeypatch):
    monkeypatch.setattr(build, "free_bytes", lambda device: 1000)
    with pytest.raises(UsageError, match=r"the weights take .* GiB"):
        plan_engine(ModelConfig(path=save(tiny_model("llama")), device="cpu"), BATCHING)
