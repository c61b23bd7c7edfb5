"""The probe reads a model's layers, and refuses by name what the engine would answer wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from cbgen.engine.cache.groups import AttentionSpan
from cbgen.engine.model.probe import probe_model
from cbgen.errors import UsageError
from tests.helpers.engine import make_request, run_engine, tokens_of
from tests.helpers.models import WINDOW, make_engine, random_model, tiny_config, tiny_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
WINDOWED = {"sliding_window": 5, "use_sliding_window": True}
OWN_ATTENTION = {
    "Bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "XGLM": {"vocab_size": 64, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4},
}
FAILING = {
    "Mpt": {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4},
    "Falcon": {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
}
BART = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "is_decoder": True,
}


def model_of(family: str, config_class: str = "", **values: Any) -> PreTrainedModel:
    """Return a small random model of a family of transformers."""
    special = {"bos_token_id": None, "eos_token_id": None}
    config = getattr(transformers, config_class or f"{family}Config")(**(special | values))
    return random_model(getattr(transformers, f"{family}ForCausalLM"), config)


def test_heads_and_windows_are_seen():
    facts = probe_model(tiny_model("gemma3"))
    assert [layer.span.window for layer in facts.layers] == [WINDOW, None]
    first = facts.layers[0]
    assert (first.num_heads, first.num_kv_heads, first.key_dim, first.value_dim) == (4, 2, 16, 16)


MODELS_WITH_LAYER_TYPES = (
    "gemma2",
    "gemma3",
    "gemma3_hybrid",
    "gemma4",
    "gpt_oss",
    "llama4",
    "qwen2_sliding",
    "qwen2_moe",
)


@pytest.mark.parametrize("name", MODELS_WITH_LAYER_TYPES)
def test_the_spans_of_layers_are_those_of_the_layer_types(name):
    model = tiny_model(name)
    spans = {
        "sliding_attention": AttentionSpan(window=WINDOW),
        "chunked_attention": AttentionSpan(chunk=WINDOW),
        "full_attention": AttentionSpan(),
    }
    wanted = [spans[layer_type] for layer_type in model.config.layer_types]
    assert [layer.span for layer in probe_model(model).layers] == wanted
    assert len(set(wanted)) == 2


@pytest.mark.parametrize("family", ["Cohere2", "Ministral", "Olmo3", "Exaone4"])
def test_the_windows_of_other_families_with_layer_types_are_right(family):
    types = {"layer_types": ["full_attention", "sliding_attention"], "head_dim": 8}
    model = model_of(family, **SIZES | WINDOWED | types)
    assert [layer.span.window for layer in probe_model(model).layers] == [None, 5]


@pytest.mark.parametrize("family", ["Mistral", "Phi3", "Mixtral", "Starcoder2", "Phimoe"])
def test_a_window_without_layer_types_is_that_of_every_layer(family):
    model = model_of(family, **SIZES | WINDOWED | {"num_local_experts": 2})
    assert [layer.span.window for layer in probe_model(model).layers] == [5, 5]


def test_what_a_layer_tells_counts_before_its_config():
    model = random_model(type(tiny_model("gemma3")), tiny_config("gemma3"))
    model.model.layers[0].self_attn.sliding_window = 3
    assert [layer.span.window for layer in probe_model(model).layers] == [3, None]


def test_a_window_that_is_not_in_use_is_none():
    model = model_of("Qwen2", **SIZES | {"sliding_window": 5, "use_sliding_window": False})
    assert [layer.span for layer in probe_model(model).layers] == [AttentionSpan()] * 2


def test_a_sliding_layer_without_a_window_is_refused():
    types = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": False}
    model = model_of("Qwen2Moe", **SIZES | types | {"num_experts": 2, "num_experts_per_tok": 1})
    with pytest.raises(UsageError) as caught:
        probe_model(model)
    assert str(caught.value) == (
        "model type 'qwen2_moe' is not supported: layer 0 is of type 'sliding_attention', and its "
        "config has no sliding_window"
    )


def test_layers_may_have_heads_of_different_sizes():
    shapes = [
        (layer.num_kv_heads, layer.key_dim) for layer in probe_model(tiny_model("gemma4")).layers
    ]
    assert shapes == [(2, 16), (2, 32)] * 2


def test_a_model_that_makes_masks_of_its_own_is_refused():
    model = model_of("Doge", **SIZES)
    with pytest.raises(UsageError, match=r"model type 'doge'.*brings a mask of its own"):
        probe_model(model)


def test_a_model_whose_tokens_see_later_ones_is_refused():
    config = transformers.BertConfig(**SIZES)
    with pytest.raises(UsageError, match=r"model type 'bert'.*lets tokens see later ones"):
        probe_model(random_model(transformers.BertLMHeadModel, config))


def test_softcap_and_sinks_are_seen():
    assert all(layer.has_softcap for layer in probe_model(tiny_model("gemma2")).layers)
    assert all(layer.has_sinks for layer in probe_model(tiny_model("gpt_oss")).layers)
    assert not any(layer.has_sinks for layer in probe_model(tiny_model("llama")).layers)


def test_the_sizes_of_the_model_are_told():
    model = tiny_model("llama")
    facts = probe_model(model)
    assert (facts.model_type, facts.vocab_size, facts.logits_size) == ("llama", 128, 128)
    assert (facts.hidden_size, facts.max_context, facts.dtype) == (32, 256, torch.float32)
    assert facts.weight_bytes == sum(p.numel() for p in model.parameters()) * 4


def test_tied_weights_are_counted_once():
    model = tiny_model("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    facts = probe_model(model)
    assert facts.weight_bytes == sum(p.numel() for p in model.parameters()) * 4


def test_the_probe_leaves_the_model_as_it_was():
    model = tiny_model("llama")
    before = model.config._attn_implementation
    probe_model(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("family", OWN_ATTENTION)
def test_a_model_that_ignores_the_hook_is_refused(family):
    model = model_of(family, **OWN_ATTENTION[family])
    with pytest.raises(UsageError) as caught:
        probe_model(model)
    assert str(caught.value) == (
        f"model type '{family.lower()}' is not supported: its attention does not go through "
        "transformers' attention interface in layers 0, 1 of 2"
    )


@pytest.mark.parametrize(
    ("family", "config_class", "values", "layer_type"),
    [
        ("Lfm2", "", {"layer_types": ["conv", "full_attention"]}, "conv"),
        ("Mamba", "", {}, "linear_attention"),
    ],
)
def test_layers_of_other_kinds_are_refused(family, config_class, values, layer_type):
    model = model_of(family, config_class, **SIZES | values)
    with pytest.raises(UsageError, match=rf"not supported: it has layers of type '{layer_type}'"):
        probe_model(model)


@pytest.mark.parametrize("family", FAILING)
def test_a_model_that_fails_in_the_probe_is_refused(family):
    model = model_of(family, **FAILING[family])
    with pytest.raises(UsageError, match=f"model type '{family.lower()}' is not supported"):
        probe_model(model)


def test_a_model_with_a_state_beside_attention_is_refused():
    state = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_ssm": 64}
    with pytest.raises(UsageError, match="model type 'falcon_h1' is not supported"):
        probe_model(model_of("FalconH1", **SIZES | state))


def test_a_model_that_attends_twice_in_a_layer_is_refused():
    with pytest.raises(UsageError, match="model type 'diffllama' is not supported"):
        probe_model(model_of("DiffLlama", **SIZES))


def test_a_model_that_takes_no_positions_is_refused():
    with pytest.raises(UsageError, match="model type 'bart' is not supported"):
        probe_model(model_of("Bart", **BART))


def test_long_rows_do_not_change_the_positions_of_short_ones():
    """Under longrope the longest row of a forward pass decides how all rows are rotated."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    }
    model = random_model(type(tiny_model("llama")), tiny_config("llama", rope_parameters=rope))
    with make_engine(model, page_size=16, num_blocks=16) as built:
        alone = run_engine(built.engine, [make_request("a", 5, max_new_tokens=12)])
        rows = [make_request("a", 5, max_new_tokens=12), make_request("b", 60, max_new_tokens=12)]
        together = run_engine(built.engine, rows)
    assert tokens_of(together)["a"] == tokens_of(alone)["a"]
