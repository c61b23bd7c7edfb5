"""Logits processors: as transformers' own, for the rows that ask, with the tokens they have had."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cbgen.engine.sampling.params import SamplingParams
from cbgen.engine.sampling.processors import (
    LogitsProcessor,
    LogitsProcessors,
    RowTokens,
    TokenHistory,
)
from cbgen.engine.sampling.sampler import Sampler
from cbgen.engine.sampling.scores import Logits
from cbgen.engine.step import AdmittedRow, ScheduledRequest
from tests.helpers.engine import make_request, run_engine, tokens_of
from tests.helpers.models import full_logits, make_engine, tiny_model, tiny_reference

CPU = torch.device("cpu")
PROMPTS = ((9, 4, 77, 9), (1,), tuple(range(20, 41)), (100, 3, 3, 8, 5))
SAMPLING = {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "seed": 4}


def rows(**params):
    return [
        make_request(str(i), prompt, **({"max_new_tokens": 14} | params))
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("penalty", [0.7, 1.1, 2.0])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mistral"])
def test_greedy_answers_with_a_repetition_penalty_are_those_of_generate(name, penalty):
    with make_engine(name, page_size=4, num_blocks=128, max_batch_tokens=8) as built:
        answers = tokens_of(run_engine(built.engine, rows(repetition_penalty=penalty)))
    for number, prompt in enumerate(PROMPTS):
        wanted = tiny_reference(name, prompt, 14, penalty)
        assert answers[str(number)] == wanted
    assert any(tiny_reference(name, p, 14, penalty) != tiny_reference(name, p, 14) for p in PROMPTS)


@pytest.mark.parametrize("sampling", [{}, SAMPLING], ids=["greedy", "sampled"])
def test_processed_log_probabilities_include_the_penalty_and_raw_ones_do_not(sampling):
    params = sampling | {"repetition_penalty": 1.3}
    outputs = {}
    for mode in ("raw", "processed"):
        with make_engine("llama", page_size=16, num_blocks=64) as built:
            outputs[mode] = run_engine(built.engine, rows(logprobs=mode, **params))
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])
    if sampling:
        processors += [TemperatureLogitsWarper(1.5), TopKLogitsWarper(20), TopPLogitsWarper(0.9)]
    for name, output in outputs["processed"].items():
        ids = [*output.prompt_ids, *output.generated_tokens]
        logits = full_logits(tiny_model("llama"), ids)
        assert outputs["raw"][name].generated_tokens == output.generated_tokens
        for place, token in enumerate(output.generated_tokens):
            end = len(output.prompt_ids) + place
            raw = logits[end - 1][None]
            scores = processors(torch.tensor([ids[:end]]), raw.clone())
            for wanted, got in ((raw, outputs["raw"][name]), (scores, output)):
                logprob = wanted.log_softmax(-1)[0, token].item()
                assert got.logprobs[place] == pytest.approx(logprob, abs=1e-4)


def test_a_preempted_row_keeps_its_history():
    requests = rows(repetition_penalty=1.5)
    with make_engine("llama", page_size=4, num_blocks=12, safety_margin=0.0) as built:
        answers = tokens_of(run_engine(built.engine, requests))
    assert sum(request.num_preemptions for request in requests) > 0
    assert list(answers.values()) == [tiny_reference("llama", p, 14, 1.5) for p in PROMPTS]


@pytest.mark.parametrize("sampling", [{}, SAMPLING], ids=["greedy", "sampled"])
def test_a_penalized_neighbour_changes_no_bit_of_a_row(sampling):
    params = sampling | {"logprobs": "processed"}
    outputs = []
    for penalty in (1.0, 1.7):
        neighbour = make_request("neighbour", [5, 6, 7], repetition_penalty=penalty, **params)
        with make_engine("llama", page_size=16, num_blocks=64) as built:
            answers = run_engine(built.engine, [neighbour, *rows(**params)])
        del answers["neighbour"]
        outputs.append([(o.generated_tokens, o.logprobs) for o in answers.values()])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_penalized_as_by_transformers_each_by_its_own_number(dtype):
    choose, penalties = random.Random(3), [1.0, 1.3, 0.6, 1.0, 2.5]
    prompts = [[choose.randrange(50) for _ in range(choose.choice([1, 9, 40]))] for _ in penalties]
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    processors = LogitsProcessors(8, 50, CPU)
    persistent = [6, 2, 7, 0, 3]
    for row, prompt, penalty in zip(persistent, prompts, penalties, strict=True):
        params = SamplingParams(repetition_penalty=penalty)
        assert processors.admit(AdmittedRow(row, prompt, params)) == (penalty != 1)
    scores = processors.process(logits.clone(), persistent)
    for place, (prompt, penalty) in enumerate(zip(prompts, penalties, strict=True)):
        transformers_own = RepetitionPenaltyLogitsProcessor(penalty)
        wanted = transformers_own(torch.tensor([prompt]), logits[place][None].float())[0]
        assert torch.equal(scores[place].float(), wanted)


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_scores_stay_numbers_under_a_penalty_beyond_float32(penalty):
    processors = LogitsProcessors(1, 4, CPU)
    processors.admit(AdmittedRow(0, [1, 2], SamplingParams(repetition_penalty=penalty)))
    scores = processors.process(torch.tensor([[1.0, 500.0, -500.0, 0.0]]), [0])
    assert scores.isfinite().all()


class PresencePenalty(LogitsProcessor):
    """What another penalty would be: it counts each token of the answer once."""

    off = 0.0

    def value(self, params: SamplingParams) -> float:
        return params.min_p

    def process(self, scores: torch.Tensor, values: torch.Tensor, tokens: RowTokens) -> None:
        counts = torch.zeros_like(scores)
        counts.scatter_add_(1, tokens.token_ids, tokens.is_generated().float())
        scores -= values[:, None] * (counts > 0)


def test_a_processor_can_tell_the_answer_from_the_prompt():
    processors = LogitsProcessors(4, 8, CPU, kinds=(PresencePenalty,))
    asks = SamplingParams(min_p=0.5)
    processors.admit(AdmittedRow(1, [1, 2, 3], asks))
    processors.admit(AdmittedRow(2, [1], asks, generated_tokens=[5, 5]))
    processors.append([2, 0, 1], torch.tensor([6, 7, 3]))
    processors.append([1], torch.tensor([4]))
    scores = processors.process(torch.zeros(2, 8), [1, 2])
    assert scores.tolist() == [[0, 0, 0, -0.5, -0.5, 0, 0, 0], [0, 0, 0, 0, 0, -0.5, -0.5, 0]]


def test_a_token_that_the_host_has_not_seen_is_in_the_history():
    sampler = Sampler(2, 8, CPU)
    asks = SamplingParams(repetition_penalty=2.0)
    sampler.admit([AdmittedRow(1, [0, 6], asks), AdmittedRow(0, [0], SamplingParams())])
    logits = torch.tensor([[0.0, 1.0, 8.0, 7.0, 5.0, 0.0, 9.0, 0.0]] * 2)
    drawn = []
    for step in range(3):  # none is waited for before the next one is launched
        items = [ScheduledRequest(row, 1, str(row), 2 + step, 1, 1, 1) for row in (1, 0)]
        drawn.append(sampler.draw(Logits(logits), items))
    # 8 and 7 are halved once drawn, 9 from the start.
    answers = [[sample.token_ids[0] for sample in step.result().samples] for step in drawn]
    assert answers == [[2, 6], [3, 6], [4, 6]]


def known(history: TokenHistory, row: int) -> tuple[list[int], list[int]]:
    """Return prompt and answer of a row as its history has them."""
    tokens = history.gather([row])
    ids = tokens.token_ids[0, : int(tokens.num_tokens[0])].tolist()
    return ids[: int(tokens.num_prompt[0])], ids[int(tokens.num_prompt[0]) :]


def test_histories_are_those_of_their_rows_whatever_comes_and_goes():
    choose, history = random.Random(5), TokenHistory(12, 100, CPU)
    wanted: dict[int, tuple[list[int], list[int]]] = {}
    for _ in range(400):
        row = choose.randrange(12)
        if choose.random() < 0.2:
            prompt = [choose.randrange(100) for _ in range(choose.randrange(1, 30))]
            answer = [choose.randrange(100) for _ in range(choose.choice([0, 0, 5]))]
            history.admit(AdmittedRow(row, prompt, SamplingParams(), answer))
            wanted[row] = (prompt, answer)
        elif choose.random() < 0.1:
            history.forget(row)
            wanted.pop(row, None)
        else:
            step = choose.sample(range(12), choose.randrange(1, 12))
            tokens = [choose.randrange(100) for _ in step]
            history.append(step, torch.tensor(tokens))
            for stepped, token in zip(step, tokens, strict=True):
                if stepped in wanted:
                    wanted[stepped][1].append(token)
        for name, tokens_of_row in wanted.items():
            assert known(history, name) == tokens_of_row


def test_a_shorter_history_ends_in_repetitions_of_its_first_token():
    history = TokenHistory(12, 100, CPU)
    history.admit(AdmittedRow(0, [7, 8], SamplingParams()))
    history.admit(AdmittedRow(1, list(range(50)), SamplingParams()))
    tokens = history.gather([0, 1]).token_ids
    assert tokens.shape == (2, 50)
    assert tokens[0].tolist() == [7, 8] + [7] * 48


def test_histories_take_memory_while_rows_have_one():
    history = TokenHistory(12, 100, CPU)
    empty = history.num_bytes
    history.append([0, 1], torch.tensor([4, 5]))
    for row in (3, 4):
        history.admit(AdmittedRow(row, [1, 2, 3], SamplingParams()))
    assert empty < history.num_bytes < 1000
    history.forget(3)
    assert history.num_bytes > empty
    history.forget(4)
    assert history.num_bytes == empty


def test_a_row_taken_by_a_request_without_processors_loses_its_history():
    processors = LogitsProcessors(2, 10, CPU)
    processors.admit(AdmittedRow(1, [1, 2], SamplingParams(repetition_penalty=2.0)))
    processors.admit(AdmittedRow(1, [3], SamplingParams()))
    scores = processors.process(torch.ones(1, 10), [1])
    assert scores.tolist() == [[1.0] * 10]


def test_tokens_without_a_score_are_left_out():
    history = TokenHistory(1, 10, CPU)
    history.admit(AdmittedRow(0, [11, 3, 12], SamplingParams(), generated_tokens=[4]))
    assert known(history, 0) == ([3], [4])
