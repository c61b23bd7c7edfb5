"""One bad row of every kind: each gets its error row, and nobody else notices."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest

GOOD = [
    {"id": "text", "prompt": "Hello"},
    {"id": "chat", "messages": [{"role": "user", "content": "Hello"}]},
    {"id": "ids", "prompt_token_ids": [0, 40, 50]},
    {"id": "input_ids", "input_ids": [0, 40, 50, 60], "topic": "numbers"},
    {"id": "sampled", "prompt": "Hi", "generation_config": {"temperature": 0.9, "seed": 3}},
    {"id": "short", "prompt": "Hi", "generation_config": {"max_new_tokens": 2}},
    {"prompt": "a row without an id"},
]

BAD: dict[str, tuple[object, str]] = {
    "not JSON": (b'{"prompt": ', "invalid_json"),
    "not an object": (b'["prompt"]', "not_an_object"),
    "nested without end": (b'{"prompt": ' + b"[" * 100_000, "nested_too_deeply"),
    "not UTF-8": (b'{"prompt": "\xff"}', "invalid_utf8"),
    "lone surrogate": (b'{"prompt": "a\\ud800b"}', "lone_surrogate"),
    "no form": ({"question": "Who?"}, "no_prompt"),
    "nothing at all": ({}, "no_prompt"),
    "two forms": (
        {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
        "ambiguous_prompt",
    ),
    "both names of ids": ({"prompt_token_ids": [5], "input_ids": [5]}, "ambiguous_prompt"),
    "repeated id": ({"id": "text", "prompt": "again"}, "duplicate_id"),
    "id that is no id": ({"id": [1], "prompt": "a"}, "invalid_id"),
    "prompt that is a number": ({"prompt": 5}, "invalid_prompt"),
    "renders to no tokens": ({"prompt": ""}, "empty_prompt"),
    "no messages": ({"messages": []}, "invalid_messages"),
    "message without role": ({"messages": [{"content": "a"}]}, "invalid_messages"),
    "message without content": ({"messages": [{"role": "user"}]}, "invalid_messages"),
    "role that the template refuses": (
        {"messages": [{"role": "wizard", "content": "a"}]},
        "chat_template_failed",
    ),
    "empty prompt_token_ids": ({"prompt_token_ids": []}, "invalid_prompt_token_ids"),
    "ids that are text": ({"prompt_token_ids": ["5"]}, "invalid_prompt_token_ids"),
    "negative id": ({"prompt_token_ids": [-1]}, "invalid_prompt_token_ids"),
    "id outside the vocabulary": ({"prompt_token_ids": [5, 260]}, "token_out_of_vocabulary"),
    "id beyond 64 bits": (
        b'{"prompt_token_ids": [123456789012345678901]}',
        "token_out_of_vocabulary",
    ),
    "does not fit the context": ({"prompt": "a" * 256}, "prompt_too_long"),
    "ids that do not fit": ({"prompt_token_ids": [5] * 256}, "prompt_too_long"),
    "no room under max_length": (
        {"prompt": "abc", "generation_config": {"max_length": 3}},
        "prompt_too_long",
    ),
    "generation_config that is a list": (
        {"prompt": "a", "generation_config": []},
        "invalid_generation_config",
    ),
    "unknown generation_config key": (
        {"prompt": "a", "generation_config": {"temprature": 1.0}},
        "invalid_generation_config",
    ),
    "bad generation_config value": (
        {"prompt": "a", "generation_config": {"temperature": -1}},
        "invalid_generation_config",
    ),
    "unsupported generation_config value": (
        {"prompt": "a", "generation_config": {"num_beams": 4}},
        "invalid_generation_config",
    ),
    "continuation": ({"prompt": "a", "continuation": "b"}, "unsupported"),
    "line of a batch without method": (
        {"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "a"}},
        "no_prompt",
    ),
}


def without_index(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "index"}


def interleaved() -> list[object]:
    """Return the bad rows with a good one after every fourth of them, ids of their own added."""
    rows: list[object] = list(GOOD[:1])
    good = iter(GOOD[1:])
    for number, (row, _) in enumerate(BAD.values()):
        rows.append(row)
        if number % 4 == 3:
            rows.extend([item] if (item := next(good, None)) else [])
    return [*rows, *good]


@pytest.fixture(scope="module")
def all_rows() -> list[object]:
    return interleaved()


@pytest.fixture
def answered(cbgen, recipe, rows_file, all_rows):
    """The run over good and bad rows."""
    return cbgen("run", recipe, "-i", rows_file(*all_rows))


def test_every_bad_row_gets_one_error_row_and_the_run_ends_with_1(answered, all_rows):
    assert answered.code == 1
    assert [row["index"] for row in answered.rows] == list(range(len(all_rows)))
    found = {}
    for name, (bad, _) in BAD.items():
        row = answered.rows[all_rows.index(bad)]
        found[name] = row["error"] and row["error"]["code"]
        assert (row["text"], row["finish_reason"], row["usage"]) == (None, "error", None), name
    assert found == {name: code for name, (_, code) in BAD.items()}


def test_every_good_row_has_the_answer_that_it_has_without_the_bad_ones(
    answered, cbgen, recipe, rows_file, all_rows
):
    alone = cbgen("run", recipe, "-i", rows_file(*GOOD), "--quiet")
    assert (alone.code, alone.err) == (0, "")
    together = [answered.rows[all_rows.index(row)] for row in GOOD]
    # The id of a row without one is its place.
    together[-1]["id"] = alone.rows[-1]["id"]
    assert [*map(without_index, together)] == [*map(without_index, alone.rows)]


def test_the_message_of_a_bad_row_holds_place_or_value(answered, all_rows):
    messages = {
        name: answered.rows[all_rows.index(row)]["error"]["message"]
        for name, (row, _) in BAD.items()
    }
    assert "in.jsonl:2" in messages["not JSON"]
    assert "temperature" in messages["unknown generation_config key"]
    assert "260" in messages["id outside the vocabulary"]
    assert "256" in messages["does not fit the context"]
    assert "wizard" in messages["role that the template refuses"]
    assert "in.jsonl:1" in messages["repeated id"]


def test_the_summary_counts_errors_by_code_and_says_how_to_see_them(answered, all_rows):
    assert f"{len(all_rows)} read, {len(GOOD)} answered, {len(BAD)} failed" in answered.err
    assert "invalid_generation_config 4" in answered.err
    assert "duplicate_id 1" in answered.err


def test_the_command_of_the_summary_shows_the_bad_rows_alone(
    cbgen, recipe, rows_file, all_rows, tmp_path
):
    target = tmp_path / "with 'quotes'.jsonl"
    finished = cbgen("run", recipe, "-i", rows_file(*all_rows), "-o", str(target))
    command = re.search(r"to see them: (.*)", finished.err)
    assert command is not None
    shown = subprocess.run(["sh", "-c", command[1]], capture_output=True, text=True, check=True)
    assert len(shown.stdout.splitlines()) == len(BAD)


def test_a_row_without_a_column_of_the_template_fails_alone(cbgen, recipe, rows_file):
    rows = [{"question": "Who?"}, {"answer": "You"}, {"question": "What?"}]
    template = 'prompt.template="Q: {question}"'
    finished = cbgen("run", recipe, "-i", rows_file(*rows), "--set", template)
    assert finished.code == 1
    assert [row["error"] is None for row in finished.rows] == [True, False, True]
    assert "question" in finished.rows[1]["error"]["message"]
    alone = cbgen("run", recipe, "-i", rows_file(rows[0], rows[2]), "--set", template)
    assert [row["text"] for row in alone.rows] == [finished.rows[i]["text"] for i in (0, 2)]


def test_a_run_whose_rows_all_fail_writes_them_all(cbgen, recipe, rows_file, tmp_path):
    rows, target = [bad for bad, _ in BAD.values()], tmp_path / "out.jsonl"
    finished = cbgen("run", recipe, "-i", rows_file(*rows), "-o", str(target))
    assert finished.code == 1
    assert f"{len(rows)} read, 1 answered" in finished.err  # the first to use a repeated id
    written = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["index"] for row in written] == list(range(len(rows)))
