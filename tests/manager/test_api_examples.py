"""Every program in examples/python runs, in this process and on a tiny model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.helpers.sources import ROOT

FOLDER = ROOT / "examples" / "python"
MAX_LINES = 40


@pytest.fixture
def run_example(checkpoint, monkeypatch, capsys):
    """Return a function that runs an example and returns the lines that it printed."""

    def run(name: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [name, str(checkpoint)])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_streaming_py_prints_an_answer_and_why_it_ended(run_example):
    assert run_example("streaming.py")[-1] == "[length after 48 tokens]"


def test_cancelling_py_ends_one_request_and_not_the_other(run_example):
    counting, short = run_example("cancelling.py")
    assert counting.startswith("counting: CANCELLED after 1")
    assert short == "short: FINISHED after 4 tokens"


def test_sampling_per_request_py_answers_each_request_in_its_way(run_example):
    answers = dict(line.split(": ", 1) for line in run_example("sampling_per_request.py"))
    assert set(answers) == {
        *("greedy", "careful", "wild", "three"),
        *("three__child#0", "three__child#1"),
    }
    assert len(set(answers.values())) > 3


def test_rl_logprobs_py_trains_between_two_generations(run_example):
    lines = run_example("rl_logprobs.py")
    assert len(lines) == 3
    assert all(float(line.rsplit(" ", 1)[1]) < 1e-4 for line in lines)


def test_asyncio_service_py_answers_all_clients(run_example):
    lines = run_example("asyncio_service.py")
    assert [line.split("?")[0] for line in lines] == [
        "What is a cat",
        "What is a dog",
        "What is rain",
        "What is bread",
    ]


def test_every_example_is_short_and_has_a_test():
    tests = Path(__file__).read_text(encoding="utf-8")
    for path in FOLDER.glob("*.py"):
        assert path.name in tests
        assert len(path.read_text(encoding="utf-8").splitlines()) < MAX_LINES
