"""Tiny random models, what `model.generate` answers with them, and engines on them.

Weights are large enough that greedy text varies. The models are shared by all tests: attach them
and give them back, change nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from cbgen.engine.build import BuiltEngine, assemble_engine, plan_facts
from cbgen.engine.config import ContinuousBatchingConfig
from cbgen.engine.events import EngineObserver
from cbgen.engine.forward import run_model
from cbgen.engine.model.attach import attached
from cbgen.engine.model.probe import probe_model
from cbgen.engine.plan import resolve

VOCAB_SIZE = 128
CONTEXT = 256
WINDOW = 8

_NO_SPECIAL_TOKENS = {"eos_token_id": None, "bos_token_id": None}
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    **_NO_SPECIAL_TOKENS,
}
_ONE_SLIDING_LAYER = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
# With tied embeddings the later Gemmas, random as they are, repeat the last token for ever.
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": False}

_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SIZES),
    "qwen3": ("Qwen3", _SIZES | {"head_dim": 16}),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": VOCAB_SIZE,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": CONTEXT,
            **_NO_SPECIAL_TOKENS,
        },
    ),
    "gemma": ("Gemma", _SIZES | {"head_dim": 16}),
    "gemma2": ("Gemma2", _SIZES | _ONE_SLIDING_LAYER | _GEMMA),
    "gemma3": ("Gemma3", _SIZES | _ONE_SLIDING_LAYER | _GEMMA),
    # Five sliding layers and one full one, in groups of one layer.
    "gemma3_hybrid": (
        "Gemma3",
        _SIZES
        | _GEMMA
        | {
            "intermediate_size": 48,
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
    ),
    # Full layers have other heads than sliding ones, so their pages have other shapes.
    "gemma4": (
        "Gemma4",
        _SIZES
        | _GEMMA
        | {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    # Chunks reach the model by its mask alone; queries of the full layer grow with the position.
    "llama4": (
        "Llama4",
        _SIZES
        | {
            "head_dim": 16,
            "intermediate_size_mlp": 64,
            "num_hidden_layers": 4,
            "num_local_experts": 2,
            "moe_layers": [1, 3],
            "attention_chunk_size": WINDOW,
            "floor_scale": 8,
            "attn_scale": 0.5,
        },
    ),
    "mistral": ("Mistral", _SIZES | {"sliding_window": WINDOW}),
    "qwen2_sliding": (
        "Qwen2",
        _SIZES | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "smollm3": (
        "SmolLM3",
        _SIZES | {"no_rope_layers": [1, 0], "bos_token_id": 1, "eos_token_id": 2},
    ),
    # The window reaches the model by its mask alone.
    "qwen2_moe": (
        "Qwen2Moe",
        _SIZES
        | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
        | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 32},
    ),
    "phimoe": (
        "Phimoe",
        _SIZES | {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    "gpt_oss": (
        "GptOss",
        _SIZES
        | _ONE_SLIDING_LAYER
        | {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
}
_CONFIG_CLASSES = {
    "Gemma3": "Gemma3TextConfig",
    "Gemma4": "Gemma4TextConfig",
    "Llama4": "Llama4TextConfig",
}
_MODEL_CLASSES = {"GPT2": "GPT2LMHeadModel"}

PLAIN_MODELS = ("llama", "qwen3", "gpt2", "gemma", "mistral", "gemma3")
"""Models that every backend can run."""
EAGER_MODELS = ("gemma2", "gpt_oss")
"""Models with softcap or sinks."""
HYBRID_MODELS = ("gemma3_hybrid", "gemma4", "llama4", "qwen2_sliding", "qwen2_moe", "phimoe")
"""Models with several layer groups, pages of different shapes, or windows that only masks show."""


def tiny_config(name: str, **changes: Any) -> PretrainedConfig:
    """Return the config of a tiny model; `changes` are its fields."""
    family, values = _CONFIGS[name]
    config_class = getattr(transformers, _CONFIG_CLASSES.get(family, f"{family}Config"))
    config: PretrainedConfig = config_class(**(values | changes))
    return config


def random_model(model_class: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Return a model with random weights, the same ones on every call."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        model = model_class(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.3)
    finally:
        torch.set_rng_state(state)
    return model


@cache
def tiny_model(name: str) -> PreTrainedModel:
    """Return the shared tiny model of that name."""
    family = _CONFIGS[name][0]
    model_class = getattr(transformers, _MODEL_CLASSES.get(family, f"{family}ForCausalLM"))
    return random_model(model_class, tiny_config(name))


def greedy_reference(
    model: PreTrainedModel, prompt: Sequence[int], num_tokens: int, **options: Any
) -> list[int]:
    """Return what `model.generate` answers to one prompt."""
    generated = model.generate(
        torch.tensor([list(prompt)], device=model.device),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=model.device),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    answer: list[int] = generated[0, len(prompt) :].tolist()
    return answer


@cache
def tiny_reference(
    name: str, prompt: tuple[int, ...], num_tokens: int, repetition_penalty: float = 1.0
) -> list[int]:
    """Return the greedy answer of a tiny model, computed once."""
    return greedy_reference(
        tiny_model(name), prompt, num_tokens, repetition_penalty=repetition_penalty
    )


def full_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the logits of a plain forward pass: [len(token_ids), vocab] float64."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(token_ids)]), use_cache=False).logits
    return logits[0].double()


@contextmanager
def make_engine(
    model: PreTrainedModel | str,
    attention: str = "auto",
    *,
    first_answer_share: float = 0.0,
    observer: EngineObserver | None = None,
    **config: Any,
) -> Iterator[BuiltEngine]:
    """Attach an engine to a model or to the tiny model of that name.

    By default admission expects short answers, so that requests do outgrow a small cache.
    """
    if isinstance(model, str):
        model = tiny_model(model)
    facts = probe_model(model)
    plan = resolve(ContinuousBatchingConfig(**config), attention, plan_facts(facts))
    plan = replace(plan, first_answer_share=first_answer_share)
    with attached(model):
        forward = partial(run_model, model)
        engine = assemble_engine(forward, plan, facts.device, observer)
        yield BuiltEngine(engine, plan, facts)
