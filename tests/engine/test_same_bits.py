"""On a CPU a row's tokens and log-probabilities are the same bits, whatever runs beside it."""

from __future__ import annotations

import copy
import os
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from cbgen.engine.config import ModelConfig
from cbgen.engine.cpu import native
from cbgen.engine.cpu.decoder import FusedDecoder
from cbgen.engine.cpu.fusing import fuse_decoder
from cbgen.engine.cpu.linears import pack_linears
from cbgen.engine.events import StepStats
from cbgen.engine.model.loader import load_model
from cbgen.engine.request import GenerationOutput, Request
from tests.helpers.engine import make_request, run_engine
from tests.helpers.models import make_engine, tiny_model

MODEL_FILE = Path("~/.cache/cbgen/models/SmolLM2-135M-Instruct.Q4_1.gguf").expanduser()
NUM_ROWS = 100
VARIANTS: tuple[dict[str, Any], ...] = (
    # One request a step after the other, with nothing shared.
    {"max_requests_per_batch": 1, "allow_block_sharing": False},
    {"max_requests_per_batch": 64, "max_batch_tokens": 512},
    {"max_requests_per_batch": 5, "max_batch_tokens": 37, "page_size": 16},
    {"max_requests_per_batch": 64, "max_batch_tokens": 100, "page_size": 4, "num_blocks": 60},
    {"max_requests_per_batch": 17, "max_batch_tokens": 512, "scheduler_type": "prefill_first"},
)
"""Each runs the rows in an order of its own."""


def rows(
    vocab_size: int, longest: int, num_new: int, logprobs: str | None = "raw"
) -> list[Request]:
    """Return requests of all kinds, half of whose prompts begin with the same tokens."""
    choose = random.Random(7)
    shared = [choose.randrange(3, vocab_size) for _ in range(longest // 2)]
    requests = []
    for index in range(NUM_ROWS):
        begin = shared if index % 2 else []
        own = [choose.randrange(3, vocab_size) for _ in range(choose.randint(1, longest // 2))]
        sampling = {"temperature": 1.0, "top_p": 0.9, "seed": index} if index % 3 == 0 else {}
        if index % 5 < 2:
            sampling["repetition_penalty"] = 0.8 if index % 5 else 1.2
        requests.append(
            make_request(
                str(index),
                [*begin, *own],
                max_new_tokens=choose.randint(2, num_new),
                logprobs=logprobs,
                **sampling,
            )
        )
    return requests


def run(
    model: PreTrainedModel, requests: list[Request], seed: int, config: dict[str, Any]
) -> tuple[dict[str, GenerationOutput], StepStats]:
    """Run the requests in an order of that seed."""
    random.Random(seed).shuffle(requests)
    with make_engine(model, **config) as built:
        outputs = run_engine(built.engine, requests)
        return outputs, built.engine.stats()


def bits_of(outputs: dict[str, GenerationOutput]) -> dict[str, tuple[Any, ...]]:
    return {
        request_id: (output.generated_tokens, output.logprobs, output.finish_reason)
        for request_id, output in outputs.items()
    }


def assert_same_bits(model: PreTrainedModel, longest: int, num_new: int) -> None:
    """Run all variants; some of them must have preempted and have found prefixes."""
    assert any(isinstance(module, FusedDecoder) for module in model.modules())
    answers, preempted, cached = [], 0, 0
    for seed, config in enumerate(VARIANTS):
        requests = rows(model.config.vocab_size, longest, num_new)
        outputs, stats = run(model, requests, seed, config)
        answers.append(bits_of(outputs))
        preempted += stats.num_preemptions
        cached += stats.num_cached_tokens
    assert preempted > 0
    assert cached > 10 * longest
    assert len(answers[0]) == NUM_ROWS
    for other in answers[1:]:
        assert other == answers[0]
    # Best tokens that are found without all logits.
    requests = [
        request
        for request in rows(model.config.vocab_size, longest, num_new, logprobs=None)
        if request.params.temperature == 0
    ]
    outputs, _ = run(model, requests, len(VARIANTS), VARIANTS[1])
    tokens = {request_id: bits[0] for request_id, bits in answers[0].items()}
    assert len(outputs) > NUM_ROWS // 2
    for request_id, output in outputs.items():
        assert output.generated_tokens == tokens[request_id]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_tiny_model_answers_in_the_same_bits(name):
    kernels = native.kernels()
    if kernels is None:
        pytest.skip(f"{native.why_missing()}")
    model = copy.deepcopy(tiny_model(name))
    pack_linears(model, kernels)
    assert fuse_decoder(model, kernels)
    assert_same_bits(model, longest=40, num_new=16)


@pytest.mark.slow
def test_smollm2_answers_in_the_same_bits():
    if not MODEL_FILE.is_file() and "CI" not in os.environ:
        pytest.skip(f"{MODEL_FILE} is missing; `make model` fetches it")
    model = load_model(ModelConfig(path=str(MODEL_FILE), dtype="float32")).model
    assert_same_bits(model, longest=80, num_new=24)
