"""A recipe for the tiny model, an input whose rows take different times, and its right answers."""

from __future__ import annotations

import json
import os

import pytest

from tests.cli.conftest import cbgen  # noqa: F401  the command line in the test's own process
from tests.helpers.commands import Command

ROWS = 24


@pytest.fixture(autouse=True)
def _fsync_waits_for_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power fails in truth: DyingDisk notes what is synced; a death keeps what is written."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def slow_recipe(checkpoint, tmp_path_factory) -> str:
    """A recipe that answers four rows at a time, so that a run has many steps."""
    path = tmp_path_factory.mktemp("faults") / "recipe.yaml"
    path.write_text(
        f"model:\n  path: {checkpoint}\n"
        "prompt:\n  chat: false\n"
        "generation_config:\n  max_new_tokens: 8\n  ignore_eos: true\n"
        "continuous_batching_config:\n"
        "  num_blocks: 64\n  page_size: 16\n  max_requests_per_batch: 4\n"
    )
    return str(path)


@pytest.fixture(scope="session")
def few_rows(tmp_path_factory):
    """Rows for runs of which only the end counts."""
    path = tmp_path_factory.mktemp("faults") / "few.jsonl"
    path.write_text('{"id": "a", "prompt": "Hi", "n": 1}\n{"prompt_token_ids": [5, 6]}\n')
    return str(path)


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """Rows of which every third is longer than its neighbours."""
    path = tmp_path_factory.mktemp("faults") / "in.jsonl"
    rows = [
        {
            "id": f"r{index}",
            "prompt": f"word {index}",
            "generation_config": {"max_new_tokens": 12 if index % 3 == 0 else 4 + index % 4},
        }
        for index in range(ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def undisturbed(slow_recipe, source, tmp_path_factory):
    """Return the output of an undisturbed run, by suffix."""
    folder = tmp_path_factory.mktemp("undisturbed")

    def output_of(suffix):
        path = folder / f"out{suffix}"
        if not path.exists():
            command = Command("run", slow_recipe, "-i", str(source), "-o", str(path), "--quiet")
            assert command.wait() == 0, command.err.text
        return path

    return output_of
