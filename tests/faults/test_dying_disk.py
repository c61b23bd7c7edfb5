"""Runs that end at every single operation on the disk: killed, or with the power failing.

Death is simulated in this process, where a run takes milliseconds; test_killed_processes.py has
the real one.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cbgen.errors import UsageError
from tests.helpers.dying_disk import DyingDisk, small_sizes
from tests.helpers.small_runs import (
    SUFFIXES,
    assert_same_output,
    make_recipe,
    run_small,
    write_input,
)

# What is dead closes nothing.
pytestmark = pytest.mark.filterwarnings("ignore:Unclosed file:ResourceWarning")

ROWS = 12
RETRIED = frozenset({"error", "length"})
NUM_RETRIED = 5
ORDERS = ("input", "completion")
CASES = [
    pytest.param(suffix, order, marks=() if is_quick else pytest.mark.slow)
    for suffix, order, is_quick in [
        (".jsonl", "input", True),
        (".jsonl", "completion", False),
        (".jsonl.gz", "input", False),
        (".jsonl.gz", "completion", False),
        (".jsonl.zst", "input", False),
        (".jsonl.zst", "completion", True),
        (".parquet", "input", True),
        (".parquet", "completion", False),
    ]
]


@dataclass
class Deaths:
    """A run that dies at each operation in turn, in a folder of its own each time."""

    folder: Path
    suffix: str
    order: str

    def __post_init__(self) -> None:
        self.source = write_input(self.folder, ROWS)
        self.recipe = make_recipe(self.order)
        self.output = self.folder / "run" / f"out{self.suffix}"
        self.reference = self.reference_of()

    def reference_of(self, **changes: object) -> Path:
        """Return the output of an undisturbed run."""
        folder = self.folder / f"reference-{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        path = folder / self.output.name
        run_small(**{"source": self.source, "recipe": self.recipe, "output": path, **changes})
        return path

    def each(
        self,
        run: Callable[[], object],
        *,
        before: Callable[[], object] = lambda: None,
        halves: tuple[bool, ...] = (False, True),
    ) -> Iterator[DyingDisk]:
        """Let `run` die at each operation, and give the test its turn after each death."""
        for half in halves:
            for number in itertools.count():
                shutil.rmtree(self.output.parent, ignore_errors=True)
                self.output.parent.mkdir()
                before()
                with small_sizes(), DyingDisk(number, half=half, folder=self.output.parent) as disk:
                    run()
                if not disk.has_died:
                    assert number > 10, "a run has more operations than that"
                    break
                yield disk

    def check(self, reference: Path | None = None) -> None:
        """Check the output against an undisturbed one."""
        assert_same_output(self.output, reference or self.reference, self.order)


@pytest.fixture
def deaths(tmp_path, suffix, order):
    return Deaths(tmp_path, suffix, order)


@pytest.mark.parametrize(("suffix", "order"), CASES)
def test_a_run_that_dies_loses_no_row_that_was_written(deaths):
    d = deaths
    written: list[int] = []

    def run():
        written.clear()
        run_small(d.source, d.output, d.recipe, written=written)

    for _ in d.each(run):
        resumed = run_small(d.source, d.output, d.recipe, resume=True)
        assert resumed.rows_resumed >= len(written)
        d.check()


@pytest.mark.parametrize(("suffix", "order"), CASES)
def test_resumes_that_die_too_lose_no_row(deaths):
    d, chance = deaths, random.Random(0)
    written: list[int] = []

    def run():
        written.clear()
        run_small(d.source, d.output, d.recipe, written=written)

    for _ in d.each(run, halves=(True,)):
        for _ in range(3):
            with small_sizes(), DyingDisk(chance.randrange(60), half=chance.random() < 0.5):
                run_small(d.source, d.output, d.recipe, written=written, resume=True)
        resumed = run_small(d.source, d.output, d.recipe, resume=True)
        assert resumed.rows_resumed >= len(written)
        d.check()


@pytest.mark.parametrize(("suffix", "order"), CASES)
def test_a_retry_that_dies_loses_no_row_that_it_was_not_to_redo(deaths):
    d = deaths
    for _ in d.each(
        lambda: run_small(d.source, d.output, d.recipe, resume=True, retry=RETRIED),
        before=lambda: run_small(d.source, d.output, d.recipe),
    ):
        resumed = run_small(d.source, d.output, d.recipe, resume=True)
        assert resumed.rows_resumed >= ROWS - NUM_RETRIED
        d.check()


@pytest.mark.parametrize(("suffix", "order"), CASES)
def test_an_overwriting_run_that_dies_leaves_rows_of_one_recipe(deaths):
    d, other = deaths, make_recipe(deaths.order, max_new_tokens=20)
    other_reference = d.reference_of(recipe=other)
    for _ in d.each(
        lambda: run_small(d.source, d.output, other, overwrite=True),
        before=lambda: run_small(d.source, d.output, d.recipe),
    ):
        try:
            run_small(d.source, d.output, other, resume=True)
        except UsageError as error:
            assert "max_new_tokens was 4 and is 20" in str(error)
            run_small(d.source, d.output, d.recipe, resume=True)
            d.check()
        else:
            d.check(other_reference)


@pytest.mark.parametrize(("suffix", "order"), CASES)
def test_a_run_with_changed_rows_that_dies_never_keeps_their_old_answers(deaths, tmp_path):
    d = deaths
    (tmp_path / "changed").mkdir()
    changed = write_input(tmp_path / "changed", ROWS, {3: "new question", 7: "another one"})
    changed_reference = d.reference_of(source=changed)
    for _ in d.each(
        lambda: run_small(changed, d.output, d.recipe, resume=True, resume_any=True),
        before=lambda: run_small(d.source, d.output, d.recipe),
    ):
        try:
            run_small(changed, d.output, d.recipe, resume=True)
        except UsageError as error:
            assert "in.jsonl:4: the input has changed" in str(error)
            run_small(changed, d.output, d.recipe, resume=True, resume_any=True)
        d.check(changed_reference)


@pytest.mark.parametrize(("suffix", "order"), CASES)
def test_a_power_failure_loses_no_row_that_was_synced(deaths):
    d, chance = deaths, random.Random(1)
    written: list[int] = []

    def run():
        written.clear()
        run_small(d.source, d.output, d.recipe, written=written)

    for disk in d.each(run):
        disk.fail_power(chance)
        resumed = run_small(d.source, d.output, d.recipe, resume=True)
        assert resumed.rows_resumed >= len(written), "each row is synced once it is written here"
        d.check()


@pytest.mark.parametrize(("suffix", "order"), CASES)
def test_a_power_failure_during_a_retry_leaves_what_resumes(deaths):
    d, chance = deaths, random.Random(2)
    for disk in d.each(
        lambda: run_small(d.source, d.output, d.recipe, resume=True, retry=RETRIED),
        before=lambda: run_small(d.source, d.output, d.recipe),
    ):
        disk.fail_power(chance)
        resumed = run_small(d.source, d.output, d.recipe, resume=True)
        assert resumed.rows_resumed >= ROWS - NUM_RETRIED
        d.check()


def test_every_kind_of_output_is_tested():
    assert {case.values for case in CASES} == set(itertools.product(SUFFIXES, ORDERS))
