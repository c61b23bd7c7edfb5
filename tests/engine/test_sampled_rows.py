"""A sampled row has its tokens from its own seed, whatever runs beside it, before it or instead."""

from __future__ import annotations

import random

import numpy
import torch

from cbgen.engine.sampling.params import derive_seed
from tests.helpers.engine import make_request, run_engine, tokens_of
from tests.helpers.models import make_engine
from tests.helpers.scripted import ScriptedModel, make_scripted_engine

PROMPT = (5, 99, 23, 42, 7, 1, 64)
SAMPLING = {"temperature": 1.2, "top_p": 0.95, "seed": 77, "max_new_tokens": 16}


def the_row(request_id: str = "row"):
    return make_request(request_id, PROMPT, **SAMPLING)


def other_rows(count: int):
    choose = random.Random(5)
    return [
        make_request(
            f"other {number}",
            [choose.randrange(1, 128) for _ in range(choose.randrange(1, 30))],
            temperature=choose.choice([0.0, 0.5, 1.0, 3.0]),
            top_k=choose.choice([0, 4, 60]),
            seed=number,
            max_new_tokens=choose.randrange(1, 20),
        )
        for number in range(count)
    ]


def tokens_in(rows, **config) -> dict[str, list[int]]:
    with make_engine("llama", **({"page_size": 4, "num_blocks": 512} | config)) as built:
        return tokens_of(run_engine(built.engine, rows))


def alone() -> list[int]:
    return tokens_in([the_row()])["row"]


def test_a_sampled_row_is_not_the_greedy_one():
    greedy = tokens_in([make_request("row", PROMPT, max_new_tokens=16)])["row"]
    assert alone() != greedy


def test_a_row_has_the_same_tokens_alone_and_in_a_batch_of_50():
    assert tokens_in([*other_rows(49), the_row()])["row"] == alone()


def test_all_rows_have_the_same_tokens_in_another_order():
    forwards = tokens_in([the_row(), *other_rows(30)])
    backwards = tokens_in([*reversed(other_rows(30)), the_row()])
    assert forwards == backwards


def test_all_rows_have_the_same_tokens_under_other_limits():
    usual = tokens_in([the_row(), *other_rows(30)])
    assert tokens_in([the_row(), *other_rows(30)], max_batch_tokens=8) == usual
    assert tokens_in([the_row(), *other_rows(30)], max_requests_per_batch=3) == usual
    assert tokens_in([the_row(), *other_rows(30)], page_size=256, num_blocks=40) == usual


def test_a_preempted_row_has_the_same_tokens():
    first, row = other_rows(1)[0], the_row()
    with make_engine("llama", page_size=4, num_blocks=9, safety_margin=0.0) as built:
        got = tokens_of(run_engine(built.engine, [first, row]))["row"]
    assert row.num_preemptions > 0
    assert got == alone()


def test_the_same_seed_and_prompt_give_the_same_answer_under_any_id():
    answers = tokens_in([the_row("a"), the_row("b")])
    assert answers["a"] == answers["b"] == alone()


def test_another_seed_gives_another_answer():
    other = make_request("row", PROMPT, **(SAMPLING | {"seed": 78}))
    assert tokens_in([other])["row"] != alone()


def test_a_thousand_rows_of_one_run_seed_draw_as_a_thousand_independent_ones():
    vocab = 32
    engine = make_scripted_engine(
        ScriptedModel(lambda token_id, position: {}, vocab_size=vocab),
        max_batch_tokens=256,
        max_requests=128,
        num_blocks=512,
    )
    rows = [
        make_request(str(i), [1], temperature=1.0, seed=derive_seed(0, str(i)), max_new_tokens=4)
        for i in range(1000)
    ]
    answers = list(tokens_of(run_engine(engine, rows)).values())
    for place in range(4):
        counts = torch.bincount(torch.tensor([a[place] for a in answers]), minlength=vocab)
        chi_square = ((counts - 1000 / vocab) ** 2 / (1000 / vocab)).sum().item()
        assert chi_square < 68  # 31 degrees of freedom: exceeded once in 10,000
    assert len({tuple(answer) for answer in answers}) >= 998


def test_the_callers_random_generators_are_not_moved():
    torch.manual_seed(3)
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    with make_engine("llama", page_size=4, num_blocks=64) as built:
        run_engine(built.engine, [make_request("row", PROMPT, **SAMPLING)])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(map(numpy.array_equal, numpy.random.get_state(), states[2]))


def test_the_callers_generators_change_no_answer():
    torch.manual_seed(1)
    first = alone()
    torch.manual_seed(2)
    assert alone() == first
