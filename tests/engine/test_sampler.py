"""The vectorized sampler: filters as in transformers, draws from the softmax, rows on their own."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cbgen.engine.sampling import noise, sampler, scores
from cbgen.engine.sampling.sampler import SamplingRows
from cbgen.engine.sampling.scores import token_logprobs


def make_rows(*params: dict[str, float]) -> SamplingRows:
    """Return the parameters of rows; a row is a mapping of the fields that are not off."""

    def column(name: str, off: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row.get(name, off) for row in params], dtype=dtype)

    return SamplingRows(
        rows=torch.arange(len(params)),
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.long),
        top_p=column("top_p", 1.0, torch.float64),
        min_p=column("min_p", 0.0, torch.float64),
        seed=column("seed", 0, torch.long),
        positions=column("position", 0, torch.long),
        has_processors=torch.zeros(len(params), dtype=torch.bool),
        logprobs=torch.zeros(len(params), dtype=torch.long),
    )


def sample(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token of each row, and whether its logits were numbers."""
    drawn = sampler.sample(logits, rows)
    return drawn.token_ids, drawn.answers >= 0


def random_logits(num_rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab, generator=generator) * spread


def survivors(monkeypatch, logits: torch.Tensor, **params: float) -> set[int]:
    """Return the tokens of one row for which noise is drawn."""
    drawn = []

    def record(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        drawn.append(token_ids)
        return torch.zeros(token_ids.shape, dtype=torch.float64)

    monkeypatch.setattr(noise, "gumbel_noise", record)
    sample(logits[None], make_rows(params))
    return set(torch.cat(drawn).tolist())


def warped_survivors(logits: torch.Tensor, **params: float) -> set[int]:
    """Return the tokens that transformers' own warpers leave, in generate's order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(params.get("temperature", 1.0)))])
    if params.get("top_k"):
        warpers.append(TopKLogitsWarper(int(params["top_k"])))
    if params.get("top_p", 1.0) < 1:
        warpers.append(TopPLogitsWarper(params["top_p"]))
    if params.get("min_p"):
        warpers.append(MinPLogitsWarper(params["min_p"]))
    return set(warpers(None, logits[None].clone())[0].isfinite().nonzero().flatten().tolist())


FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 200},
    {"top_p": 0.1},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 0.5},
    {"min_p": 1.0},
    {"temperature": 0.3, "top_p": 0.8},
    {"temperature": 2.0, "top_p": 0.8},
    {"temperature": 0.7, "min_p": 0.1},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 7, "min_p": 0.02},
    {"top_p": 0.8, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.03},
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_filters_leave_the_tokens_that_transformers_leaves(monkeypatch, params, seed):
    logits = random_logits(1, 200, seed, spread=2.0)[0]
    assert survivors(monkeypatch, logits, **params) == warped_survivors(logits, **params)


def test_a_temperature_of_zero_takes_the_best_token():
    logits = random_logits(50, 300)
    tokens, finite = sample(
        logits, make_rows(*[{"temperature": 0.0, "seed": s} for s in range(50)])
    )
    assert torch.equal(tokens, logits.argmax(-1))
    assert finite.all()


def test_greedy_rows_take_the_first_of_equal_tokens_as_argmax_does():
    logits = torch.randint(0, 3, (40, 30), generator=torch.Generator().manual_seed(0)).float()
    tokens, _ = sample(logits, make_rows(*[{"temperature": 0.0}] * 40))
    assert torch.equal(tokens, logits.argmax(-1))


def test_filters_change_nothing_for_greedy_rows():
    logits = random_logits(1, 100)
    row = {"temperature": 0.0, "top_k": 3, "top_p": 0.1, "min_p": 0.9}
    assert torch.equal(sample(logits, make_rows(row))[0], logits.argmax(-1))


@pytest.mark.parametrize(
    "row", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-6}], ids=str
)
def test_the_strictest_filters_leave_the_best_token(row):
    logits = random_logits(30, 100)
    rows = make_rows(*[row | {"seed": seed} for seed in range(30)])
    assert torch.equal(sample(logits, rows)[0], logits.argmax(-1))


def test_a_top_k_beyond_the_vocabulary_keeps_all(monkeypatch):
    logits = random_logits(1, 40)[0]
    assert survivors(monkeypatch, logits, top_k=10**9) == set(range(40))


def test_equal_scores_at_the_border_of_top_k_stay_together(monkeypatch):
    logits = torch.tensor([3.0, 1.0, 2.0, 2.0, 2.0, 0.0])
    assert survivors(monkeypatch, logits, top_k=2) == {0, 2, 3, 4}


def test_equal_scores_at_the_border_of_top_p_stay_together(monkeypatch):
    logits = torch.tensor([2.0, 2.0, 2.0, 2.0, -5.0])
    assert survivors(monkeypatch, logits, top_p=0.3) == {0, 1, 2, 3}


def test_equal_scores_at_the_border_of_min_p_stay_together(monkeypatch):
    logits = torch.tensor([0.5, 0.5, 0.5, -1.0])
    assert survivors(monkeypatch, logits, min_p=1.0) == {0, 1, 2}


def test_tokens_without_hope_are_dropped_before_noise_is_drawn(monkeypatch):
    logits = torch.tensor([0.0, -41.0, -43.0, float("-inf")])
    assert survivors(monkeypatch, logits) == {0, 1}


@pytest.mark.parametrize(
    ("params", "kept"),
    [({}, 8), ({"temperature": 0.6}, 8), ({"temperature": 1.7}, 8), ({"top_k": 3}, 3)],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1, 2**62])
def test_draws_are_distributed_as_the_softmax(params, kept, seed):
    num_draws = 20_000
    logits = torch.tensor([1.0, 0.0, -0.5, 0.5, 0.2, -1.0, 0.9, -0.2])
    rows = make_rows(params | {"seed": seed})
    rows = rows.select(torch.zeros(num_draws, dtype=torch.long))
    rows.positions.copy_(torch.arange(num_draws))
    tokens, _ = sample(logits.expand(num_draws, 8), rows)
    divided = logits.double() / params.get("temperature", 1.0)
    divided[divided < divided.topk(kept).values[-1]] = float("-inf")
    wanted = divided.softmax(-1) * num_draws
    counts = torch.bincount(tokens, minlength=8)
    possible = wanted > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - wanted) ** 2 / wanted)[possible].sum().item()
    assert chi_square < {8: 29.9, 3: 18.4}[kept]  # exceeded once in 10,000


def mixed_rows(num_rows: int) -> list[dict[str, float]]:
    choices = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2, "temperature": 1.5},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
        {"top_p": 0.99},
    ]
    return [
        choices[number % len(choices)] | {"seed": number, "position": 3 * number}
        for number in range(num_rows)
    ]


def test_a_row_draws_the_same_token_alone_and_among_others():
    logits, params = random_logits(60, 500), mixed_rows(60)
    together, _ = sample(logits, make_rows(*params))
    alone = [sample(logits[i : i + 1], make_rows(params[i]))[0].item() for i in range(60)]
    assert together.tolist() == alone


def test_a_row_draws_the_same_token_in_any_order():
    logits, params = random_logits(60, 500), mixed_rows(60)
    together, _ = sample(logits, make_rows(*params))
    backwards, _ = sample(logits.flip(0), make_rows(*reversed(params)))
    assert torch.equal(together, backwards.flip(0))


@pytest.mark.parametrize("other", [{"top_k": 499}, {"top_p": 0.999}, {"min_p": 0.9}], ids=str)
def test_a_neighbours_parameters_change_nothing(other):
    logits = random_logits(40, 500)
    params = [{"top_k": 3, "top_p": 0.9, "seed": seed} for seed in range(40)]
    before, _ = sample(logits, make_rows(*params))
    params[1::2] = [other | {"seed": seed} for seed in range(1, 40, 2)]
    after, _ = sample(logits, make_rows(*params))
    assert torch.equal(before[::2], after[::2])


def test_many_rows_are_worked_on_in_pieces_without_effect(monkeypatch):
    logits, params = random_logits(30, 100), mixed_rows(30)
    whole = sample(logits, make_rows(*params))[0]
    monkeypatch.setattr(sampler, "SAMPLER_CHUNK", 250)
    assert torch.equal(sample(logits, make_rows(*params))[0], whole)


@pytest.mark.parametrize("changed", ["seed", "position"])
def test_another_seed_or_position_draws_other_tokens(changed):
    logits = torch.zeros(64, 1000)
    first, _ = sample(logits, make_rows(*[{"seed": 1, "position": 1}] * 64))
    second, _ = sample(
        logits, make_rows(*[{"seed": 1, "position": 1} | {changed: 2 + i} for i in range(64)])
    )
    assert len(set(first.tolist())) == 1
    assert len(set(second.tolist())) > 50


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_with_a_logit_that_is_no_number_is_flagged_alone(temperature, value):
    logits = random_logits(3, 50)
    logits[1, 17] = value
    rows = make_rows(*[{"temperature": temperature, "top_k": 9, "seed": 5}] * 3)
    clean = random_logits(3, 50)
    tokens, finite = sample(logits, rows)
    assert finite.tolist() == [True, False, True]
    assert tokens[[0, 2]].tolist() == sample(clean, rows)[0][[0, 2]].tolist()


def test_a_row_of_minus_infinity_alone_is_flagged():
    logits = torch.full((1, 9), float("-inf"))
    assert sample(logits, make_rows({"temperature": 1.0}))[1].tolist() == [False]


def test_forbidden_tokens_are_never_drawn():
    logits = torch.zeros(500, 4)
    logits[:, [0, 2]] = float("-inf")
    tokens, finite = sample(logits, make_rows(*[{"seed": seed} for seed in range(500)]))
    assert set(tokens.tolist()) == {1, 3}
    assert finite.all()


def test_very_large_logits_at_a_small_temperature_take_the_best_token():
    logits = torch.tensor([[30_000.0, 29_999.0, -30_000.0]])
    assert sample(logits, make_rows({"temperature": 1e-4}))[0].tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_logits_of_any_type_are_drawn_from(dtype):
    logits = random_logits(20, 64).to(dtype)
    rows = make_rows(*[{"temperature": 0.8, "top_p": 0.9, "seed": s} for s in range(20)])
    assert torch.equal(sample(logits, rows)[0], sample(logits.float(), rows)[0])


def test_logits_are_not_changed():
    logits = random_logits(14, 64)
    before = logits.clone()
    sample(logits, make_rows(*mixed_rows(14)))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("spread", [1.0, 20.0, 1000.0])
def test_log_probabilities_are_those_of_a_float64_softmax(spread):
    logits = random_logits(50, 400, spread=spread)
    tokens = logits.topk(5).indices[:, 4]
    wanted = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(
        token_logprobs(logits, tokens).double(), wanted, rtol=1e-6, atol=1e-4
    )


def test_log_probabilities_of_many_rows_are_computed_in_pieces(monkeypatch):
    logits, tokens = random_logits(30, 100), torch.arange(30)
    whole = token_logprobs(logits, tokens)
    monkeypatch.setattr(scores, "SAMPLER_CHUNK", 250)
    assert torch.equal(token_logprobs(logits, tokens), whole)


def test_the_log_probability_of_a_sure_token_is_zero():
    logits = torch.tensor([[100.0, -100.0]])
    assert token_logprobs(logits, torch.tensor([0])).item() == 0.0
    assert math.isclose(token_logprobs(logits, torch.tensor([1])).item(), -200.0)


@pytest.mark.parametrize("vocab", [1, 127, 128, 129, 300, 512])
def test_the_best_token_is_the_first_of_the_largest_logits(vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-3, 3, (200, vocab), generator=generator).float()
    logits[::7, -1] = float("nan")
    logits[::11, 0] = float("nan")
    logits[::5, vocab // 2] = float("inf")
    logits[3] = float("-inf")
    wanted = logits.max(dim=-1)
    token_ids, is_finite = sample(logits, make_rows(*[{"temperature": 0.0}] * 200))
    assert torch.equal(is_finite, wanted.values.isfinite())
    assert torch.equal(token_ids[is_finite], wanted.indices[is_finite])
