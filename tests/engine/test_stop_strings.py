"""Requests with stop strings: when they end, with what, and what it costs the others."""

from __future__ import annotations

import pytest

from cbgen.engine.request import FinishReason, RequestStatus
from tests.helpers.engine import (
    LetterTokenizer,
    make_request,
    make_scheduler,
    run_engine,
    run_scheduler,
    until_stop,
)
from tests.helpers.models import make_engine, tiny_reference

PROMPTS = ((9, 4, 77, 9), (1,), tuple(range(20, 41)), (100, 3, 3, 8, 5))


def run_one(answer: list[int], **params):
    """Run a request to which the model answers these tokens, over and over."""
    request = make_request("a", 3, tokenizer=LetterTokenizer(), **params)
    scheduler = make_scheduler()
    (ended,) = run_scheduler(
        scheduler, [request], lambda item: answer[item.start + item.num_tokens - 3]
    )
    return ended.output()


def test_a_request_ends_with_the_token_that_completes_a_stop_string():
    output = run_one([0, 1, 2, 3, 4] * 4, stop_strings=("cd",), max_new_tokens=20, logprobs="raw")
    assert output.generated_tokens == [0, 1, 2, 3]
    assert len(output.logprobs) == 4
    assert (output.status, output.finish_reason) == (RequestStatus.FINISHED, FinishReason.STOP)
    assert output.stop_string == "cd"


def test_a_request_whose_stop_string_never_comes_ends_as_others_do():
    output = run_one([0] * 20, stop_strings=("ab",), max_new_tokens=5)
    assert (output.finish_reason, output.stop_string) == (FinishReason.LENGTH, None)
    output = run_one([0, 7, 0], stop_strings=("ab",), stop_token_ids=frozenset({7}))
    assert (output.finish_reason, output.stop_string) == (FinishReason.STOP, None)


def test_a_stop_string_counts_before_the_length_and_is_named_beside_a_stop_token():
    output = run_one([0, 1, 2], stop_strings=("abc",), max_new_tokens=3)
    assert (output.finish_reason, output.stop_string) == (FinishReason.STOP, "abc")
    output = run_one([0, 1, 2], stop_strings=("abc",), stop_token_ids=frozenset({2}))
    assert (output.finish_reason, output.stop_string) == (FinishReason.STOP, "abc")


def test_text_that_was_held_back_is_looked_at_when_the_length_is_reached():
    class Half:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            return "x" * (len(token_ids) - 1) + "\ufffd"

    request = make_request("a", 3, tokenizer=Half(), stop_strings=("\ufffd",), max_new_tokens=4)
    (ended,) = run_scheduler(make_scheduler(), [request])
    assert (len(ended.generated_tokens), ended.stop_string) == (4, "\ufffd")
    assert ended.finish_reason is FinishReason.STOP


def test_without_a_tokenizer_a_request_with_stop_strings_fails_alone():
    requests = [
        make_request("asks", 3, stop_strings=("a",), max_new_tokens=4),
        make_request("plain", 3, max_new_tokens=4),
    ]
    ended = {each.request_id: each.output() for each in run_scheduler(make_scheduler(), requests)}
    assert ended["asks"].error_code == "no_tokenizer"
    assert "tokenizer=" in ended["asks"].error
    assert ended["plain"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_preempted_request_finds_its_stop_string(name):
    requests, wanted = [], {}
    for number, prompt in enumerate(PROMPTS):
        answer = tiny_reference(name, prompt, 14)
        tokenizer = LetterTokenizer()
        stops = (tokenizer.decode(answer[9:12], skip_special_tokens=True),)
        wanted[str(number)] = until_stop(answer, stops)
        requests.append(
            make_request(
                str(number), prompt, tokenizer=tokenizer, stop_strings=stops, max_new_tokens=14
            )
        )
    num_blocks = 6 if name == "mistral" else 11  # its layers have a window
    with make_engine(name, page_size=4, num_blocks=num_blocks, safety_margin=0.0) as built:
        outputs = run_engine(built.engine, requests)
    assert sum(request.num_preemptions for request in requests) > 0
    found = {key: (output.generated_tokens, output.stop_string) for key, output in outputs.items()}
    assert found == wanted
    assert any(len(answer) > 8 for answer, _ in wanted.values())
