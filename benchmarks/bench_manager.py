"""What the manager itself costs: an idle one, and the way of a request to its first token."""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time

import pytest
import torch
from transformers import GenerationConfig

import cbgen
from tests.helpers.models import tiny_model

IDLE_SECONDS = 5.0
NUM_REQUESTS = 200
PROMPT = list(range(1, 17))


def report(text: str) -> None:
    sys.stderr.write(f"\n{text}\n")


def cpu_seconds(thread_id: int) -> float:
    """Return the processor time that one thread has taken, to a hundredth of a second."""
    with open(f"/proc/self/task/{thread_id}/stat") as stat:
        fields = stat.read().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def manager():
    with cbgen.continuous_batching_context_manager(
        tiny_model("llama"), GenerationConfig(max_new_tokens=1)
    ) as manager:
        manager.add_request(PROMPT, request_id="warm")
        manager.get_result("warm")
        yield manager


def engine_thread() -> threading.Thread:
    (thread,) = (one for one in threading.enumerate() if one.name == "cbgen-engine")
    return thread


@pytest.mark.bench
def test_an_idle_manager_takes_less_than_a_hundredth_of_a_core(manager):
    thread_id = engine_thread().native_id
    before, started = cpu_seconds(thread_id), time.monotonic()
    process_before = time.process_time()
    time.sleep(IDLE_SECONDS)
    share = (cpu_seconds(thread_id) - before) / (time.monotonic() - started)
    process_share = (time.process_time() - process_before) / IDLE_SECONDS
    report(f"idle: {share:.2%} of a core by its thread, {process_share:.2%} by the process")
    assert share < 0.01
    assert process_share < 0.01


@pytest.mark.bench
def test_the_first_token_comes_soon_after_the_forward_pass(manager):
    """From `add_request` on an idle manager to the output, less a plain forward pass."""
    waits = []
    for number in range(NUM_REQUESTS):
        time.sleep(0.002)  # the manager falls idle
        started = time.perf_counter()
        manager.add_request(PROMPT, request_id=f"r{number}", streaming=True)
        next(manager.request_id_iter(f"r{number}"))
        waits.append(time.perf_counter() - started)
    with manager.pause(), torch.inference_mode():
        model, tokens = tiny_model("llama"), torch.tensor([PROMPT])
        passes = []
        for _ in range(NUM_REQUESTS):
            started = time.perf_counter()
            model(tokens, use_cache=False, logits_to_keep=1)
            passes.append(time.perf_counter() - started)
    wait, forward = statistics.median(waits), statistics.median(passes)
    slowest = statistics.quantiles(waits, n=20)[-1]
    report(
        f"first token: median {wait * 1e3:.2f} ms, 95th percentile {slowest * 1e3:.2f} ms; "
        f"forward pass alone {forward * 1e3:.2f} ms"
    )
    assert wait - forward < 0.005
