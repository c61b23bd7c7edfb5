"""The files around the code say what is true: README, changelog, examples."""

from __future__ import annotations

import re

from tests.helpers.sources import ROOT

TEXT_SUFFIXES = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
    ".json",
    ".jsonl",
    ".cpp",
    ".h",
    "",
}
FOLDERS = (".ci", "benchmarks", "cbgen", "docs", "examples", "recipes", "tests")
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:root|home|work|opt|Users)/")


def repository_files():
    candidates = [*ROOT.iterdir(), *(path for name in FOLDERS for path in (ROOT / name).rglob("*"))]
    return [
        path
        for path in candidates
        if path.is_file() and path.suffix in TEXT_SUFFIXES and path.name != ".git"
    ]


def make_targets():
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def readme():
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_tells_the_two_commands_of_a_new_user():
    assert {"run", "test"} <= set(re.findall(r"\bmake ([a-z-]+)", readme()))


def test_every_make_command_in_readme_and_contributing_exists():
    text = readme() + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^\s+|`)make ([a-z-]+)", text, re.MULTILINE))
    assert named - make_targets() == set()


def test_no_file_names_a_path_of_one_machine():
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in repository_files()
        for match in MACHINE_PATH.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_every_example_is_named_by_a_test_that_runs_it():
    tests = (ROOT / "tests" / "test_examples.py").read_text(encoding="utf-8")
    examples = [path.name for path in (ROOT / "examples").iterdir() if path.is_file()]
    assert [name for name in examples if name not in tests] == []
