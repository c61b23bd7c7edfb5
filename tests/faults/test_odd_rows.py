"""Whatever a line of the input holds, exactly one row or batch line answers it."""

from __future__ import annotations

import json
import random

import pytest

from cbgen.io.openai.responses import index_of_line
from tests.helpers.batch_files import chat_line, completion_line
from tests.helpers.commands import Command
from tests.helpers.odd_input import damaged, with_odd_value

SAMPLING = {
    "max_new_tokens": 2, "temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 1,
    "stop_strings": ["a"], "eos_token_id": [1], "stop_token_ids": [5], "num_return_sequences": 2,
    "do_sample": True, "ignore_eos": True, "repetition_penalty": 1.2, "skip_special_tokens": False,
}  # fmt: skip
BODY = {
    "max_tokens": 2, "temperature": 0.7, "top_p": 0.9, "n": 2, "seed": 1, "stop": ["a"],
    "logprobs": None, "presence_penalty": 0, "logit_bias": {}, "user": "u", "stream": False,
    "metadata": {"a": "b"}, "return_token_ids": True, "top_k": 3, "ignore_eos": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TURNS = [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}]
GOOD_ROWS = {
    "cbgen": [
        {"prompt": "Say it", "tag": "x", "generation_config": SAMPLING},
        {"messages": TURNS, "tools": [TOOL], "generation_config": {"max_new_tokens": 1}},
        {"prompt_token_ids": [5, 6, 7, 259], "usage": 1},
        {"input_ids": [9] * 40, "text": "a column", "choices": [1]},
    ],
    "openai": [
        chat_line(messages=TURNS, **BODY),
        completion_line(echo=True, **BODY),
        completion_line(prompt=[5, 6, 7], max_tokens=1),
    ],
}
GOOD_ROWS["vllm"] = GOOD_ROWS["openai"]


def odd_lines(dialect: str, count: int) -> list[bytes]:
    """Return lines without line ends: good ones, odd ones and damaged ones."""
    chance = random.Random(f"rows {dialect} {count}")
    lines = []
    for number in range(count):
        row = dict(chance.choice(GOOD_ROWS[dialect]))
        row["id" if dialect == "cbgen" else "custom_id"] = f"r{number}"
        for _ in range(chance.choice((0, 1, 1, 2))):
            row = with_odd_value(chance, row)
        try:
            line = json.dumps(row, ensure_ascii=chance.random() < 0.5).encode()
        except UnicodeEncodeError:
            line = json.dumps(row).encode()
        if chance.random() < 0.4:
            line = damaged(chance, line)
        lines.extend(part for part in line.split(b"\n") if part.strip(b" \t\r"))
    return lines


def id_of(line: bytes, dialect: str) -> object:
    """Return the id of a line that can be read, else None."""
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # no JSON, or one that holds a lone surrogate
        return None
    value = row.get("id" if dialect == "cbgen" else "custom_id") if isinstance(row, dict) else None
    return value if isinstance(value, str) or type(value) is int else None


@pytest.mark.parametrize("dialect", GOOD_ROWS)
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_line_is_answered_once_under_its_id(slow_recipe, tmp_path, dialect, count):
    lines = odd_lines(dialect, count)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(lines))
    arguments = ["-i", str(source), "-o", str(output), "--format", dialect, "--quiet"]
    batches = ["--set", "continuous_batching_config.max_requests_per_batch=64"]
    command = Command("run", slow_recipe, *arguments, *batches)
    code = command.wait(600)
    assert code == 1, command.err.text
    assert "Traceback" not in command.err.text
    answers = output.read_bytes().decode().split("\n")
    assert answers.pop() == ""
    assert len(answers) == len(lines)
    for index, (line, answer) in enumerate(zip(lines, answers, strict=True)):
        row = json.loads(answer, parse_constant=pytest.fail)
        assert (row["index"] if dialect == "cbgen" else index_of_line(row)) == index
        expected = id_of(line, dialect)
        if expected is not None:
            assert row["id" if dialect == "cbgen" else "custom_id"] == expected, line
