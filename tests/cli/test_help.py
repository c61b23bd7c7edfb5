"""Help is short, quick, and loads no model library."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from cbgen import __version__

SLOW_MODULES = {"torch", "transformers", "tokenizers", "numpy"}


@pytest.mark.serial
@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"]], ids=" ".join)
def test_help_answers_in_less_than_0_7_seconds(arguments):
    seconds = []
    for _ in range(3):  # the machine may be busy with something else at one time
        started = time.monotonic()
        finished = subprocess.run(
            [sys.executable, "-m", "cbgen", *arguments], capture_output=True, text=True, check=False
        )
        seconds.append(time.monotonic() - started)
        assert (finished.returncode, finished.stderr) == (0, "")
        assert "Example: cbgen run recipe.yaml" in finished.stdout
    assert min(seconds) < 0.7


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["run", "missing.yaml"]])
def test_a_command_line_is_checked_without_torch(arguments):
    program = (
        f"import sys\nfrom cbgen.cli.app import run_cli\nrun_cli({arguments})\nprint(*sys.modules)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not SLOW_MODULES & set(finished.stdout.split())


def test_help_lists_the_commands_of_this_version(cbgen):
    help_text = cbgen("--help").out
    assert all(f"{name} " in help_text for name in ("run", "plan", "bench", "init", "schema"))
    assert not any(f"{name} " in help_text for name in ("serve", "compare"))


@pytest.mark.parametrize("option", ["--tp", "--replicas", "--ray"])
def test_options_of_later_versions_do_not_exist(cbgen, option):
    finished = cbgen("run", "recipe.yaml", option)
    assert (finished.code, finished.out) == (2, "")
    assert f"No such option: {option}" in finished.err


def test_version_is_the_packages(cbgen):
    assert cbgen("--version").out == f"cbgen {__version__}\n"


def test_init_writes_a_recipe_that_run_accepts(cbgen, tmp_path):
    path = tmp_path / "recipe.yaml"
    assert cbgen("init", str(path)).code == 0
    finished = cbgen("run", str(path), "-i", "missing.jsonl")
    assert "error: missing.jsonl" in finished.err


def test_init_keeps_an_existing_file(cbgen, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("mine")
    finished = cbgen("init", str(path))
    assert finished.code == 2
    assert "--force" in finished.err
    assert path.read_text() == "mine"
