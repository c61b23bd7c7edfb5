"""Log-probabilities of generated tokens are those of the raw logits of a full forward pass."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.helpers.engine import make_request, run_engine
from tests.helpers.models import full_logits, make_engine, random_model, tiny_config, tiny_model
from tests.helpers.scripted import ScriptedModel, make_scripted_engine

MODELS = ("llama", "gpt2", "gemma2", "mistral")
PROMPTS = ((9, 4, 77), (1,), tuple(range(20, 41)), (100, 3, 3, 8, 5))


def rows(**params):
    return [
        make_request(str(i), p, **({"max_new_tokens": 14, "logprobs": "raw"} | params))
        for i, p in enumerate(PROMPTS)
    ]


def assert_logprobs_are_those_of_a_full_forward(model, outputs, tolerance: float = 1e-4):
    for output in outputs.values():
        prompt, answer = output.prompt_ids, output.generated_tokens
        logits = full_logits(model, [*prompt, *answer])[len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert len(output.logprobs) == len(answer)
        assert (torch.tensor(output.logprobs, dtype=torch.float64) - wanted).abs().max() < tolerance


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_have_the_log_probability_of_a_full_forward(name):
    with make_engine(name, page_size=4, num_blocks=128, max_batch_tokens=8) as built:
        outputs = run_engine(built.engine, rows())
    assert_logprobs_are_those_of_a_full_forward(tiny_model(name), outputs)


def test_sampled_tokens_have_the_log_probability_of_the_raw_logits():
    sampling = {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "seed": 4}
    with make_engine("llama", page_size=16, num_blocks=64) as built:
        outputs = run_engine(built.engine, rows(**sampling))
    assert_logprobs_are_those_of_a_full_forward(tiny_model("llama"), outputs)


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_survive_a_preemption(name):
    requests = rows()
    num_blocks = 7 if name == "mistral" else 12  # its layers have a window, so requests stay small
    with make_engine(name, page_size=4, num_blocks=num_blocks, safety_margin=0.0) as built:
        outputs = run_engine(built.engine, requests)
    assert sum(request.num_preemptions for request in requests) > 0
    assert_logprobs_are_those_of_a_full_forward(tiny_model(name), outputs)


def test_processed_log_probabilities_are_those_that_the_warpers_leave():
    sampling = {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "seed": 4, "logprobs": "processed"}
    with make_engine("llama", page_size=16, num_blocks=64) as built:
        outputs = run_engine(built.engine, rows(**sampling))
    warpers = LogitsProcessorList(
        [TemperatureLogitsWarper(1.5), TopKLogitsWarper(20), TopPLogitsWarper(0.9)]
    )
    for output in outputs.values():
        begin = len(output.prompt_ids) - 1
        logits = full_logits(tiny_model("llama"), [*output.prompt_ids, *output.generated_tokens])[
            begin:-1
        ]
        tokens = torch.tensor(output.generated_tokens)[:, None]
        wanted = warpers(None, logits).log_softmax(-1).gather(1, tokens)[:, 0]
        assert wanted.isfinite().all()
        assert (torch.tensor(output.logprobs, dtype=torch.float64) - wanted).abs().max() < 1e-4


def test_processed_log_probabilities_of_a_greedy_row_are_the_raw_ones():
    answers = []
    for mode in ("raw", "processed"):
        with make_engine("llama", page_size=16, num_blocks=64) as built:
            answers.append(run_engine(built.engine, rows(logprobs=mode)))
    raw, processed = ([output.logprobs for output in a.values()] for a in answers)
    assert raw == processed


def test_a_bfloat16_model_gives_the_log_probabilities_of_its_own_forward():
    model = random_model(type(tiny_model("qwen3")), tiny_config("qwen3")).to(torch.bfloat16)
    with make_engine(model, page_size=4, num_blocks=128, max_batch_tokens=8) as built:
        assert built.facts.dtype is torch.bfloat16
        outputs = run_engine(built.engine, rows())
    assert_logprobs_are_those_of_a_full_forward(model, outputs, tolerance=0.5)


def test_rows_that_ask_and_rows_that_do_not_may_share_a_step():
    asked = make_request("asked", [1], max_new_tokens=3, logprobs="raw")
    silent = make_request("silent", [1], max_new_tokens=3)
    outputs = run_engine(make_scripted_engine(ScriptedModel()), [silent, asked])
    assert outputs["silent"].logprobs == []
    assert len(outputs["asked"].logprobs) == 3


def test_chosen_logits_give_the_log_probability_of_their_softmax():
    model = ScriptedModel(lambda token_id, position: {3: 2.0, 4: 1.0}, vocab_size=5)
    request = make_request("a", [1], max_new_tokens=1, logprobs="raw")
    output = run_engine(make_scripted_engine(model), [request])["a"]
    wanted = torch.tensor([0.0, 0.0, 0.0, 2.0, 1.0]).log_softmax(-1)[3].item()
    assert output.logprobs == [pytest.approx(wanted, abs=1e-6)]
