"""Makes the folders that the peers load or export: `python make_models.py FOLDER MODEL.gguf`.

FOLDER/smollm2 holds the weights of the GGUF file in bfloat16, so that all peers have the same ones;
FOLDER/qwen3-0.6b-shape has the shape of Qwen3-0.6B and random weights. Needs torch, transformers,
gguf and accelerate.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_RESIDUAL_SCALE = 6.0
"""Layers of default size hardly change the residual, and greedy text is one repeated token."""


def make_smollm2(folder: Path, gguf: Path) -> PreTrainedTokenizerBase:
    """Write the model of the GGUF file; return its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_qwen3_shape(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a random model of that shape; exporters want a tokenizer beside it, any will do."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        rope_theta=1e6,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(_RESIDUAL_SCALE)
            layer.self_attn.o_proj.weight.mul_(_RESIDUAL_SCALE)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    target, gguf_file = Path(sys.argv[1]), Path(sys.argv[2])
    make_qwen3_shape(target / "qwen3-0.6b-shape", make_smollm2(target / "smollm2", gguf_file))
