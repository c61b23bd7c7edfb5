"""Whatever the command line says, it ends as it should and harms no file that was there."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from functools import partial
from pathlib import Path

import pytest

from cbgen.cli import stopping
from tests.helpers.commands import Command

WITH_VALUE = (
    "-i", "--input", "-o", "--output", "--set", "--limit", "--shard", "--format", "--retry",
    "--order", "--time-limit", "--requeue-signal", "--stats", "--metrics", "--trace", "--nothing",
)  # fmt: skip
FLAGS = (
    "--overwrite", "--resume", "--resume-any", "--strict", "--quiet", "-q", "--overwrite",
    "--resume", "--help", "--version", "--", "-x",
)  # fmt: skip
COMMANDS = (*["run"] * 20, "plan", "plan", "merge", "init", "schema", "", "rnu")
DIGITS = "9" * 700
ODD_TEXTS = (
    "", " ", "-1", "0", "1", "2", "1/2", "0/1", "5/2", "0/0", f"0/{DIGITS}", DIGITS, f"-{DIGITS}",
    "1.5", "1e9", "nan", "inf", "90s", "1ms", f"{DIGITS}h", "1-02:03:04", "-5s", "USR1", "KILL",
    "TERM", "64", "CHLD", "openai", "vllm", "cbgen", "error", "error,length", "error,,", "input",
    "completion", "=", "a=b", "model.path=", "output.order=completion", "prompt.system=\U0001f600",
    "generation_config.max_new_tokens=1", f"generation_config.seed={DIGITS}",
    "generation_config=[1]", "model=", "output.columns=[a,", "output.columns={n}", "x.y.z=1",
    "W1", "\ufeff", "\u2028", "a\nb", "\x1b[2J", "*", "[", "?.jsonl", "~", "~nobody/x", "$HOME",
    "http://", "memory://x", "file://", "s3://b/c", "\udcff.jsonl", "x" * 300, "out.parquet/",
)  # fmt: skip


def make_folder(folder: Path, recipe: str, few_rows: str, checkpoint: Path) -> dict[str, bytes]:
    """Fill a folder with what a command may be pointed at; return the files by name."""
    rows = Path(few_rows).read_bytes()
    files = {
        "recipe.yaml": Path(recipe).read_bytes().replace(os.fsencode(checkpoint), b"model"),
        "in.jsonl": rows,
        "n\u00e4me \udce9.jsonl": rows,  # a name that is not UTF-8
        "bad.jsonl": b'{"prompt": 5}\n\xff\n',
        "empty.jsonl": b"",
        "in.jsonl.gz": b"no gzip",
        "in.parquet": b"no table",
        "sub/in.jsonl": rows,
        **{f"model/{path.name}": path.read_bytes() for path in checkpoint.iterdir()},
    }
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(data)
    links = {"link.jsonl": "in.jsonl", "link.yaml": "recipe.yaml", "loop": "loop", "torn": "no/x"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    return files


PATHS = (
    "/dev/full",  # first, as it is no input: it is an endless line
    "recipe.yaml", "in.jsonl", "n\u00e4me \udce9.jsonl", "bad.jsonl", "empty.jsonl", "in.jsonl.gz",
    "in.parquet", "sub", "sub/in.jsonl", "link.jsonl", "link.yaml", "loop", "torn", "new.jsonl",
    "new.jsonl.gz", "new.jsonl.zst", "new.parquet", "new.jsonl.run", "missing/x.jsonl", ".", "/",
    "/dev/null", "/proc/version", "in.jsonl/x", "./in.jsonl", "sub/../in.jsonl",
    "new \udcff.jsonl", "-", "model", "model/config.json", "model/tokenizer.json",
)  # fmt: skip


def odd_command(chance: random.Random) -> list[str]:
    """Return arguments: of a sound command with odd ones, or odd ones alone."""
    command = chance.choice(COMMANDS)
    arguments = [command] if command else []
    if chance.random() < 0.9 and command in ("run", "plan", "rnu"):
        odd_recipe = chance.random() < 0.15
        arguments += [chance.choice(PATHS) if odd_recipe else "recipe.yaml"]
        arguments += ["-i", chance.choice(PATHS[1:]) if chance.random() < 0.4 else "in.jsonl"]
    if command == "run":
        arguments += ["-o", chance.choice(PATHS) if chance.random() < 0.5 else "new.jsonl"]
    if command == "merge":
        arguments += chance.choices(PATHS, k=3)
    for _ in range(chance.choice((0, 1, 2, 4))):
        if chance.random() < 0.4:
            arguments.append(chance.choice(FLAGS))
        else:
            option = chance.choice(WITH_VALUE)
            paths = PATHS[1:] if option in ("-i", "--input") else PATHS
            value = chance.choice(paths if chance.random() < 0.4 else ODD_TEXTS)
            forms = [[option, value]] * 8 + [[f"{option}={value}"], [value]]
            arguments += chance.choice(forms)
    return arguments


def files_in_use(arguments: list[str]) -> set[str]:
    """Return what a command reads: a recipe and its model, and inputs."""
    pairs = list(itertools.pairwise(arguments))
    used = [name for option, name in pairs if option in ("-i", "--input", "run", "plan")]
    used += [
        argument.partition("=")[2] for argument in arguments if argument.startswith("--input=")
    ]
    return {os.path.relpath(os.path.realpath(name)) for name in used}


def check(code: int, told: str, arguments: list[str], files: dict[str, bytes]) -> None:
    """Check how a command ended, with its folder as the current one."""
    assert "Traceback" not in told, arguments
    assert code in (0, 1, 2, 3, 4), arguments
    if code == 3:
        assert "/dev/full" in told, arguments
    in_use = files_in_use(arguments)
    for name, data in files.items():
        if name in in_use or name.startswith("model/"):
            assert Path(name).read_bytes() == data, (name, arguments)


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_an_odd_command_line_is_obeyed_or_refused(
    cbgen, slow_recipe, few_rows, checkpoint, tmp_path, monkeypatch, count
):
    monkeypatch.setattr(stopping, "process_age", lambda: 0.0)  # a time limit counts pytest's life
    chance = random.Random(f"command lines {count}")
    for number in range(count):
        folder = tmp_path / str(number)
        files = make_folder(folder, slow_recipe, few_rows, checkpoint)
        monkeypatch.chdir(folder)
        arguments = odd_command(chance)
        done = cbgen(*arguments)
        check(done.code, done.err, arguments, files)
        shutil.rmtree(folder)


@pytest.mark.slow
def test_a_process_with_an_odd_command_line_ends_as_it_should(
    slow_recipe, few_rows, checkpoint, tmp_path, monkeypatch
):
    chance = random.Random("command lines of processes")
    for number in range(50):
        folder = tmp_path / str(number)
        files = make_folder(folder, slow_recipe, few_rows, checkpoint)
        monkeypatch.chdir(folder)
        arguments = odd_command(chance)
        command = Command(*arguments, prepare=partial(os.chdir, folder))
        command.end_input()
        check(command.wait(), command.err.text, arguments, files)
