"""What a small job costs beyond loading the model: time to four short answers, and memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Runs in a process of its own, so that nothing else has warmed anything up.
SCRIPT = """
import json, os, threading, time
import cbgen.job.session as session
from cbgen.engine.model.load import load_model

def anonymous_bytes():
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024

loaded, facts = {}, {}
def timed_load(config):
    result = load_model(config)
    loaded["time"] = time.monotonic()
    return result
session.load_model = timed_load

peak, done = [0], threading.Event()
def watch():
    while not done.wait(0.002):
        if "time" in loaded:
            peak[0] = max(peak[0], anonymous_bytes())
threading.Thread(target=watch, daemon=True).start()

import cbgen
rows = [{"prompt": text} for text in ("Hello!", "Name a colour.", "What is 1 + 1?", "Say yes.")]
recipe = {
    "model": {"path": "~/.cache/cbgen/models/SmolLM2-135M-Instruct.Q4_1.gguf"},
    "generation_config": {"max_new_tokens": 8, "ignore_eos": True},
}
answers = list(cbgen.run(recipe, rows))
seconds = time.monotonic() - loaded["time"]
done.set()
assert [row["usage"]["completion_tokens"] for row in answers] == [8, 8, 8, 8], answers
print(json.dumps({"seconds": seconds, "peak_bytes": peak[0]}))
"""
WEIGHT_BYTES = 134_515_008 * 4
GIB = 2**30


@pytest.mark.bench
def test_four_short_prompts_cost_little_beyond_loading():
    """Four prompts, eight new tokens each: under 1.5 s, and under the weights plus 1 GB."""
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=300
    )
    figures = json.loads(ran.stdout.splitlines()[-1])
    sys.stderr.write(
        f"\nfour short prompts: {figures['seconds']:.2f} s beyond loading, "
        f"peak anonymous memory {figures['peak_bytes'] / GIB:.2f} GiB "
        f"(weights {WEIGHT_BYTES / GIB:.2f} GiB)\n"
    )
    assert figures["seconds"] < 1.5
    assert figures["peak_bytes"] < WEIGHT_BYTES + GIB
