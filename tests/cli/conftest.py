"""A recipe for the tiny model, and the command line in the test's own process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from cbgen.cli.app import run_cli
from tests.helpers.commands import jsonl, parse_rows

MAX_NEW_TOKENS = 6


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows on stdout."""
        return parse_rows(self.out)


@pytest.fixture(scope="session")
def recipe(checkpoint, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(
        f"model:\n  path: {checkpoint}\n"
        "prompt:\n  chat: false\n"
        f"generation_config:\n  max_new_tokens: {MAX_NEW_TOKENS}\n"
        "continuous_batching_config:\n  num_blocks: 64\n  page_size: 16\n"
    )
    return str(path)


@pytest.fixture
def cbgen(capfd) -> Callable[..., Finished]:
    """Run a command in this process; `cbgen("run", recipe, ...)`."""

    def run(*arguments: str) -> Finished:
        capfd.readouterr()
        gc.freeze()  # a run collects garbage before it begins; the test libraries hold none
        code = run_cli(arguments)
        captured = capfd.readouterr()
        return Finished(code, captured.out, captured.err)

    return run


@pytest.fixture
def rows_file(tmp_path) -> Callable[..., str]:
    """Write an input file of the given rows and return its path."""

    def write(*rows: object) -> str:
        path = tmp_path / "in.jsonl"
        path.write_bytes(jsonl(*rows))
        return str(path)

    return write
