"""Greedy answers equal `model.generate`, token for token, however the work is cut up.

Rounding differs between the two, so a token could change where the two best logits nearly meet. The
committed prompts have no such place, which the first test shows; everything else asserts equality.
"""

from __future__ import annotations

import random

import pytest

from tests.helpers.engine import make_request, run_engine, tokens_of
from tests.helpers.models import (
    EAGER_MODELS,
    PLAIN_MODELS,
    VOCAB_SIZE,
    full_logits,
    greedy_reference,
    make_engine,
    tiny_model,
    tiny_reference,
)

MAIN_MODELS = ("llama", "qwen3", "gpt2", "gemma")
WINDOWED_MODELS = ("mistral", "gemma2", "gemma3", "gpt_oss")
NEAR_TIE = 1e-3
SEED = 13

LENGTHS = ((1, 20), (2, 18), (5, 16), (17, 8), (33, 12), (40, 4), (3, 24), (9, 1))
"""(prompt tokens, new tokens) of the committed rows; the prompts come from SEED."""


def committed_rows() -> list[tuple[tuple[int, ...], int]]:
    generator = random.Random(SEED)
    return [
        (tuple(generator.randrange(1, VOCAB_SIZE) for _ in range(length)), num_new)
        for length, num_new in LENGTHS
    ]


ROWS = committed_rows()


def expected(name: str, rows=ROWS) -> dict[str, list[int]]:
    return {str(i): tiny_reference(name, prompt, n) for i, (prompt, n) in enumerate(rows)}


def answers(built, rows=ROWS) -> dict[str, list[int]]:
    requests = [make_request(str(i), p, max_new_tokens=n) for i, (p, n) in enumerate(rows)]
    return tokens_of(run_engine(built.engine, requests))


@pytest.mark.parametrize("name", PLAIN_MODELS + EAGER_MODELS)
def test_no_committed_answer_has_a_near_tie(name):
    for prompt, num_new in ROWS:
        answer = tiny_reference(name, prompt, num_new)
        logits = full_logits(tiny_model(name), [*prompt, *answer])[len(prompt) - 1 : -1]
        best, second = logits.topk(2).values.unbind(-1)
        assert (best - second).min() > NEAR_TIE


@pytest.mark.parametrize("name", PLAIN_MODELS + EAGER_MODELS)
def test_tiny_models_do_not_repeat_one_token(name):
    answers = [tiny_reference(name, prompt, num_new) for prompt, num_new in ROWS]
    assert len({token for answer in answers for token in answer}) > 12


@pytest.mark.parametrize("page_size", [4, 16, 256])
@pytest.mark.parametrize("max_batch_tokens", [8, 16, 512])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MAIN_MODELS)
def test_answers_equal_generate(name, attention, max_batch_tokens, page_size):
    wanted = expected(name)
    with make_engine(
        name,
        attention,
        page_size=page_size,
        max_batch_tokens=max_batch_tokens,
        num_blocks=512 // page_size,
    ) as built:
        assert answers(built) == wanted


@pytest.mark.parametrize(("page_size", "max_batch_tokens"), [(4, 8), (16, 16), (256, 512)])
@pytest.mark.parametrize("attention", ["auto", "eager"])
@pytest.mark.parametrize("name", WINDOWED_MODELS)
def test_answers_of_models_with_windows_equal_generate(
    name, attention, page_size, max_batch_tokens
):
    wanted = expected(name)
    with make_engine(
        name,
        attention,
        page_size=page_size,
        max_batch_tokens=max_batch_tokens,
        num_blocks=512 // page_size,
    ) as built:
        assert answers(built) == wanted


@pytest.mark.parametrize("attention", ["auto", "eager"])
@pytest.mark.parametrize("name", PLAIN_MODELS + EAGER_MODELS)
def test_answers_equal_generate_when_the_cache_is_too_small_for_all(name, attention):
    wanted = expected(name)
    # Where all layers have a window, requests stay small.
    num_blocks = 8 if name == "mistral" else 13
    with make_engine(
        name, attention, page_size=4, num_blocks=num_blocks, max_batch_tokens=16, safety_margin=0.0
    ) as built:
        assert answers(built) == wanted
        assert built.engine.stats().num_preemptions > 0
        assert built.engine.stats().num_used_blocks == 0


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MAIN_MODELS)
def test_answers_of_one_and_two_rows_equal_generate(name, attention, batch_size):
    wanted = expected(name, ROWS[:6])
    with make_engine(name, attention, page_size=16, num_blocks=64) as built:
        for begin in range(0, 6, batch_size):
            requests = [
                make_request(str(i), ROWS[i][0], max_new_tokens=ROWS[i][1])
                for i in range(begin, begin + batch_size)
            ]
            outputs = tokens_of(run_engine(built.engine, requests))
            assert outputs == {key: wanted[key] for key in outputs}


@pytest.mark.parametrize("name", MAIN_MODELS)
def test_an_end_token_in_the_middle_ends_the_answer_as_generate_does(name):
    prompt, _ = ROWS[2]
    end = tiny_reference(name, prompt, 12)[5]
    wanted = greedy_reference(tiny_model(name), prompt, 12, eos_token_id=end)
    request = make_request("a", prompt, max_new_tokens=12, stop_token_ids=frozenset({end}))
    with make_engine(name, page_size=16, num_blocks=16) as built:
        output = run_engine(built.engine, [request])["a"]
    assert output.generated_tokens == wanted
    assert output.finish_reason == "stop"


def test_any_of_several_end_tokens_ends_the_answer_as_generate_does():
    prompt, _ = ROWS[2]
    full = tiny_reference("llama", prompt, 12)
    ends = [full[9], full[4]]
    wanted = greedy_reference(tiny_model("llama"), prompt, 12, eos_token_id=ends)
    request = make_request("a", prompt, max_new_tokens=12, stop_token_ids=frozenset(ends))
    with make_engine("llama", page_size=16, num_blocks=16) as built:
        assert run_engine(built.engine, [request])["a"].generated_tokens == wanted


def test_a_row_that_ends_early_changes_no_other_row():
    wanted = expected("llama")
    stop = frozenset({wanted["4"][2]})
    requests = [
        make_request(str(i), p, max_new_tokens=n, stop_token_ids=stop if i == 4 else frozenset())
        for i, (p, n) in enumerate(ROWS)
    ]
    with make_engine("llama", page_size=4, num_blocks=128) as built:
        got = tokens_of(run_engine(built.engine, requests))
    assert got["4"] == wanted["4"][:3]
    assert got | {"4": wanted["4"]} == wanted


def test_rows_that_arrive_while_others_run_equal_generate():
    wanted = expected("llama")
    with make_engine("llama", page_size=4, num_blocks=128, max_batch_tokens=16) as built:
        outputs = []
        for i, (prompt, num_new) in enumerate(ROWS):
            built.engine.add(make_request(str(i), prompt, max_new_tokens=num_new))
            outputs += built.engine.step()
        while built.engine.has_unfinished():
            outputs += built.engine.step()
    assert {output.request_id: output.generated_tokens for output in outputs} == wanted


def test_an_answer_to_the_end_of_the_context_equals_generate():
    prompt = ROWS[0][0]
    with make_engine("llama", page_size=16, num_blocks=17) as built:
        output = run_engine(built.engine, [make_request("a", prompt)])["a"]
    assert output.finish_reason == "length"
    assert len(prompt) + len(output.generated_tokens) == 256
    assert output.generated_tokens == tiny_reference("llama", prompt, 255)
