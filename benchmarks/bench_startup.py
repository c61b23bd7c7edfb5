"""What a small job costs before and beside its answers: seconds until they come, and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

# Runs in a process of its own, so that nothing else has warmed anything up.
SCRIPT = """
import json, sys, threading, time
started = time.monotonic()

def anonymous_bytes():
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024

peak, done = [0], threading.Event()
def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous_bytes())
threading.Thread(target=watch, daemon=True).start()

import cbgen.job.open_job as open_job
from cbgen.engine.model.loader import load_model

loaded = {}
def timed_load(config):
    loaded["started"] = time.monotonic()
    result = load_model(config)
    loaded["ended"] = time.monotonic()
    return result
open_job.load_model = timed_load

import cbgen
job = json.loads(sys.argv[1])
answers = list(cbgen.run(job["recipe"], job["rows"]))
ended = time.monotonic()
done.set()
assert {row["usage"]["completion_tokens"] for row in answers} == {8}, answers
print(json.dumps({
    "import_seconds": loaded["started"] - started,
    "load_seconds": loaded["ended"] - loaded["started"],
    "answer_seconds": ended - loaded["ended"],
    "peak_bytes": peak[0],
}))
"""
SMOLLM2 = "~/.cache/cbgen/models/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_BYTES = 134_515_008 * 4
GIB = 2**30
LIBRARY_BYTES = 600 * 10**6
"""What torch, transformers and a small cache may take beside the weights; they take 0.3 GB."""


def run(path: str, rows: list[dict[str, Any]], weight_bytes: int) -> dict[str, Any]:
    """Run a job in a new process and return its figures."""
    recipe = {
        "model": {"path": path},
        "generation_config": {"max_new_tokens": 8, "ignore_eos": True, "do_sample": False},
    }
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps({"recipe": recipe, "rows": rows})],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    figures: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    sys.stderr.write(
        f"\n{len(rows)} short prompts: {figures['import_seconds']:.2f} s of imports, "
        f"{figures['load_seconds']:.2f} s of loading, {figures['answer_seconds']:.2f} s beyond, "
        f"peak anonymous memory {figures['peak_bytes'] / GIB:.2f} GiB "
        f"(weights {weight_bytes / GIB:.2f} GiB)\n"
    )
    return figures


@pytest.mark.bench
def test_four_short_prompts_cost_little():
    """SmolLM2 as GGUF, eight new tokens each: loaded in 3 s, answered in 1.5 s."""
    texts = ("Hello!", "Name a colour.", "What is 1 + 1?", "Say yes.")
    figures = run(SMOLLM2, [{"prompt": text} for text in texts], SMOLLM2_BYTES)
    assert figures["load_seconds"] < 3
    assert figures["answer_seconds"] < 1.5
    assert figures["peak_bytes"] < SMOLLM2_BYTES + LIBRARY_BYTES


@pytest.mark.bench
def test_a_16_bit_checkpoint_is_held_once_and_never_widened(tmp_path):
    """Layers and vocabulary of Qwen3 0.6B, four layers of them, random."""
    config = Qwen3Config(
        hidden_size=1024,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151_936,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    weight_bytes = sum(2 * weight.numel() for weight in model.parameters())
    rows = [{"prompt_token_ids": [index, 5, 77]} for index in range(4)]
    figures = run(str(tmp_path), rows, weight_bytes)
    assert figures["peak_bytes"] < weight_bytes + LIBRARY_BYTES
