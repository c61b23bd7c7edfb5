"""Workloads of `cbgen bench`: the same tokens for a name, lengths as told, files checked."""

from __future__ import annotations

import json

import pytest

from cbgen.bench.workloads import WORKLOAD_NAMES, find_workload, make_workload
from cbgen.errors import UsageError

VOCAB_SIZE = 1000


def lengths(name: str) -> tuple[list[int], list[int]]:
    requests = make_workload(name, VOCAB_SIZE).requests
    return [len(item.prompt) for item in requests], [item.max_new_tokens for item in requests]


@pytest.fixture
def workload_file(tmp_path):
    def write(content: object) -> str:
        path = tmp_path / "workload.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def test_a_name_means_the_same_tokens_everywhere():
    first = make_workload("W1", 49152).requests[0]
    assert (len(first.prompt), first.max_new_tokens) == (99, 40)
    assert first.prompt[:4] == (607, 32087, 42301, 36479)


def test_w1_has_short_and_long_prompts_and_answers():
    prompts, answers = lengths("W1")
    assert len(prompts) == 128
    assert 16 <= min(prompts) < 20
    assert 400 < max(prompts) <= 512
    assert (min(answers), max(answers)) == (16, 128)


def test_w2_shares_512_tokens_and_no_more():
    prompts = [request.prompt for request in make_workload("W2", VOCAB_SIZE).requests]
    assert len({prompt[:512] for prompt in prompts}) == 1
    assert len({prompt[512:] for prompt in prompts}) == len(prompts) == 64
    assert {len(prompt) - 512 for prompt in prompts} <= set(range(32, 65))


@pytest.mark.parametrize(
    ("name", "requests", "prompt", "answer"),
    [("W3", 32, 32, 256), ("W3h", 32, 32, 96), ("W4", 16, 2048, 16), ("W4h", 6, 2048, 16)],
)
def test_workloads_of_one_length(name, requests, prompt, answer):
    assert lengths(name) == ([prompt] * requests, [answer] * requests)


@pytest.mark.parametrize(("part", "full", "count"), [("W1h", "W1", 64), ("W1s", "W1", 32)])
def test_a_part_has_the_first_requests_of_the_full_one(part, full, count):
    requests = make_workload(full, VOCAB_SIZE).requests[:count]
    assert make_workload(part, VOCAB_SIZE).requests == requests


def test_w2h_has_the_first_prompts_of_w2_and_shorter_answers():
    full, half = make_workload("W2", VOCAB_SIZE), make_workload("W2h", VOCAB_SIZE)
    assert [item.prompt for item in half.requests] == [item.prompt for item in full.requests[:32]]
    assert {item.max_new_tokens for item in half.requests} == {32}


@pytest.mark.parametrize("name", WORKLOAD_NAMES)
def test_all_ids_of_the_vocabulary_are_drawn_and_no_others(name):
    drawn = {token for item in make_workload(name, 5).requests for token in item.prompt}
    assert drawn == set(range(5))


def test_a_file_is_a_workload(workload_file):
    requests = [
        {"id": 0, "prompt": [3, 1], "max_new": 6},
        {"id": 1, "prompt": [2], "max_new": 1},
    ]
    workload = find_workload(workload_file({"name": "mine", "requests": requests}))(4)
    assert workload.name == "mine"
    assert [(item.prompt, item.max_new_tokens) for item in workload.requests] == [
        ((3, 1), 6),
        ((2,), 1),
    ]
    assert (workload.num_prompt_tokens, workload.longest) == (3, 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ([], "requests"),
        ({"requests": []}, "not empty"),
        ({"requests": [[1]]}, r"requests\[0\] must be an object, got list"),
        ({"requests": [{"prompt": [], "max_new": 1}]}, r"requests\[0\]: \"prompt\""),
        ({"requests": [{"prompt": [1, -1], "max_new": 1}]}, r"requests\[0\]: \"prompt\""),
        ({"requests": [{"prompt": [True], "max_new": 1}]}, r"requests\[0\]: \"prompt\""),
        ({"requests": [{"prompt": "abc", "max_new": 1}]}, r"requests\[0\]: \"prompt\""),
        ({"requests": [{"prompt": [1], "max_new": 0}]}, r"\"max_new\" must be at least 1, got 0"),
        ({"requests": [{"prompt": [1]}]}, r"\"max_new\" must be at least 1, got None"),
        ({"name": 3, "requests": [{"prompt": [1], "max_new": 1}]}, "must be a string, got 3"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(workload_file, content, message):
    path = workload_file(content)
    with pytest.raises(UsageError, match=message) as refused:
        find_workload(path)
    assert path in str(refused.value)


def test_a_token_outside_the_vocabulary_is_refused_with_its_request(workload_file):
    requests = [{"prompt": [3], "max_new": 1}, {"prompt": [4], "max_new": 1}]
    make = find_workload(workload_file({"requests": requests}))
    with pytest.raises(UsageError, match=r"requests\[1\].prompt holds token 4.* 0 to 3"):
        make(4)


def test_an_unknown_name_is_told_with_the_known_ones():
    with pytest.raises(UsageError, match=r"W9: cannot be read: .*W1, W1h, W1s"):
        find_workload("W9")
