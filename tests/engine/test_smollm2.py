"""The real thing: a small language model from a GGUF file answers as `model.generate` does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cbgen.engine.config import ModelConfig
from cbgen.engine.model.loader import LoadedModel, load_model
from tests.helpers.engine import make_request, run_engine, tokens_of
from tests.helpers.models import full_logits, greedy_reference, make_engine

MODEL_FILE = Path("~/.cache/cbgen/models/SmolLM2-135M-Instruct.Q4_1.gguf").expanduser()
NUM_NEW = 16
NEAR_TIE = 1e-3
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "Give me a recipe for pancakes. Keep it short, and list what I need to buy first.",
)


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The loaded model; it takes many seconds, so all tests share it."""
    if not MODEL_FILE.is_file() and "CI" not in os.environ:
        pytest.skip(f"{MODEL_FILE} is missing; `make model` fetches it")
    return load_model(ModelConfig(path=str(MODEL_FILE)))


@pytest.fixture(scope="session")
def prompts(smollm2) -> list[list[int]]:
    return [
        smollm2.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for question in QUESTIONS
    ]


@pytest.fixture(scope="session")
def references(smollm2, prompts) -> list[list[int]]:
    """What `model.generate` answers to each prompt."""
    ends = sorted(smollm2.eos_token_ids)
    return [
        greedy_reference(smollm2.model, prompt, NUM_NEW, eos_token_id=ends) for prompt in prompts
    ]


def answers(built, prompts, smollm2) -> list[list[int]]:
    """Return the answers to all prompts of one batch."""
    requests = [
        make_request(str(i), prompt, max_new_tokens=NUM_NEW, stop_token_ids=smollm2.eos_token_ids)
        for i, prompt in enumerate(prompts)
    ]
    outputs = tokens_of(run_engine(built.engine, requests))
    return [outputs[str(i)] for i in range(len(prompts))]


def test_no_committed_answer_has_a_near_tie(smollm2, prompts, references):
    for prompt, answer in zip(prompts, references, strict=True):
        logits = full_logits(smollm2.model, [*prompt, *answer])[len(prompt) - 1 : -1]
        best, second = logits.topk(2).values.unbind(-1)
        assert (best - second).min() > NEAR_TIE


def test_the_file_gives_model_tokenizer_and_end_tokens(smollm2):
    assert smollm2.model.config.model_type == "llama"
    assert smollm2.tokenizer.decode([smollm2.tokenizer.eos_token_id]) == "<|im_end|>"
    assert smollm2.tokenizer.eos_token_id in smollm2.eos_token_ids


@pytest.mark.parametrize(("page_size", "max_batch_tokens"), [(16, 32), (256, 1024)])
def test_a_batch_of_six_answers_as_generate_does(
    smollm2, prompts, references, page_size, max_batch_tokens
):
    with make_engine(
        smollm2.model,
        page_size=page_size,
        max_batch_tokens=max_batch_tokens,
        num_blocks=2048 // page_size,
    ) as built:
        assert answers(built, prompts, smollm2) == references


def test_batches_of_two_answer_as_generate_does(smollm2, prompts, references):
    with make_engine(smollm2.model, page_size=256, num_blocks=8) as built:
        for begin in (0, 2):
            pair = slice(begin, begin + 2)
            assert answers(built, prompts[pair], smollm2) == references[pair]


def test_single_rows_answer_as_generate_does(smollm2, prompts, references):
    with make_engine(smollm2.model, page_size=16, num_blocks=16, max_batch_tokens=16) as built:
        for prompt, wanted in zip(prompts[:2], references, strict=False):
            assert answers(built, [prompt], smollm2) == [wanted]


def test_rows_answer_as_generate_does_after_preemption(smollm2, prompts, references):
    longest = max(map(len, prompts)) + NUM_NEW
    with make_engine(
        smollm2.model,
        page_size=16,
        num_blocks=-(-longest // 16) + 4,
        max_batch_tokens=64,
        safety_margin=0.0,
    ) as built:
        assert answers(built, prompts, smollm2) == references
        assert built.engine.stats().num_preemptions > 0


def test_the_capital_of_france_is_paris(smollm2, references):
    assert "Paris" in smollm2.tokenizer.decode(references[0])
