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
        (".parquet", "input", False),
        (".parquet", "completion", False),
    ]
]


@dataclass
class Deaths:
    """A run that dies at each operation in turn, in a folder of its own each time."""

    folder: Path
    suffix: str
    order: str
    power: random.Random | None = None
    """Decides what a power failure leaves; None where the process alone dies."""

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
        syncs: bool = True,
    ) -> Iterator[None]:
        """Let `run` die at each operation, and give the test its turn after each death."""
        for half in (False, True):
            for number in itertools.count():
                shutil.rmtree(self.output.parent, ignore_errors=True)
                self.output.parent.mkdir()
                before()
                disk = DyingDisk(number, half=half, folder=self.output.parent)
                with small_sizes(syncs=syncs), disk:
                    run()
                if not disk.has_died:
                    assert number > 10, "a run has more operations than that"
                    break
                if self.power is not None:
                    disk.fail_power(self.power)
                yield

    def check(self, reference: Path | None = None) -> None:
        """Check the output against an undisturbed one."""
        assert_same_output(self.output, reference or self.reference, self.order)


def refusal_of(run: Callable[[], object]) -> str | None:
    """Return with which words a run is refused, None where it is not."""
    try:
        run()
    except UsageError as error:
        return str(error)
    return None


@pytest.fixture
def deaths(tmp_path, suffix, order):
    return Deaths(tmp_path, suffix, order)


each_kind = pytest.mark.parametrize(("suffix", "order"), CASES)
each_death = pytest.mark.parametrize("fails_power", [False, True], ids=["killed", "power fails"])


@each_kind
@pytest.mark.parametrize("syncs", [False, True], ids=["no syncs", "syncs"])
def test_a_run_that_is_killed_loses_no_row_that_was_written(deaths, syncs):
    d = deaths
    written: list[int] = []

    def run():
        written.clear()
        run_small(d.source, d.output, d.recipe, written=written)

    for _ in d.each(run, syncs=syncs):
        resumed = run_small(d.source, d.output, d.recipe, resume=True)
        assert resumed.rows_resumed >= len(written)
        d.check()


@each_kind
def test_a_power_failure_loses_no_row_that_was_synced(deaths):
    d, d.power = deaths, random.Random(1)
    written: list[int] = []

    def run():
        written.clear()
        run_small(d.source, d.output, d.recipe, written=written)

    for _ in d.each(run):
        resumed = run_small(d.source, d.output, d.recipe, resume=True)
        assert resumed.rows_resumed >= len(written), "here each row is synced when it is written"
        d.check()


@each_kind
def test_resumes_that_are_killed_too_lose_no_row(deaths):
    d, chance = deaths, random.Random(0)
    written: list[int] = []

    def run():
        written.clear()
        run_small(d.source, d.output, d.recipe, written=written)

    for _ in d.each(run):
        for _ in range(2):
            disk = DyingDisk(chance.randrange(60), half=chance.random() < 0.5)
            with small_sizes(syncs=chance.random() < 0.5), disk:
                run_small(d.source, d.output, d.recipe, written=written, resume=True)
        resumed = run_small(d.source, d.output, d.recipe, resume=True)
        assert resumed.rows_resumed >= len(written)
        d.check()


@each_kind
@each_death
def test_a_retry_that_dies_loses_no_row_that_it_was_not_to_redo(deaths, fails_power):
    d, d.power = deaths, random.Random(0) if fails_power else None
    for _ in d.each(
        lambda: run_small(d.source, d.output, d.recipe, resume=True, retry=RETRIED),
        before=lambda: run_small(d.source, d.output, d.recipe),
    ):
        resumed = run_small(d.source, d.output, d.recipe, resume=True)
        assert resumed.rows_resumed >= ROWS - NUM_RETRIED
        d.check()


@each_kind
@each_death
def test_an_overwriting_run_that_dies_leaves_rows_of_one_recipe(deaths, fails_power):
    d, d.power = deaths, random.Random(0) if fails_power else None
    other = make_recipe(d.order, max_new_tokens=20)
    other_reference = d.reference_of(recipe=other)
    for _ in d.each(
        lambda: run_small(d.source, d.output, other, overwrite=True),
        before=lambda: run_small(d.source, d.output, d.recipe),
    ):
        refusal = refusal_of(lambda: run_small(d.source, d.output, other, resume=True))
        if refusal is None:
            d.check(other_reference)
        else:
            assert "max_new_tokens was 4 and is 20" in refusal
            run_small(d.source, d.output, d.recipe, resume=True)
            d.check()


@each_kind
@each_death
@pytest.mark.parametrize("is_finished", [True, False], ids=["finished", "unfinished"])
def test_a_run_with_changed_rows_that_dies_never_keeps_their_old_answers(
    deaths, tmp_path, fails_power, is_finished
):
    d, d.power = deaths, random.Random(0) if fails_power else None
    (tmp_path / "changed").mkdir()
    changed = write_input(tmp_path / "changed", ROWS, {index: "new" for index in (3, 4, 6, 9)})
    changed_reference = d.reference_of(source=changed)

    def before():
        with small_sizes(), DyingDisk(10**9 if is_finished else 35):
            run_small(d.source, d.output, d.recipe)

    for _ in d.each(
        lambda: run_small(changed, d.output, d.recipe, resume=True, resume_any=True),
        before=before,
    ):
        refusal = refusal_of(lambda: run_small(changed, d.output, d.recipe, resume=True))
        if refusal is not None:
            assert "in.jsonl:4: the input has changed" in refusal
            run_small(changed, d.output, d.recipe, resume=True, resume_any=True)
        d.check(changed_reference)


def test_every_kind_of_output_is_tested():
    assert {case.values for case in CASES} == set(itertools.product(SUFFIXES, ORDERS))
