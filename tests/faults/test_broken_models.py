"""Whatever is wrong with the files of a model, the command says so and names the folder."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from tests.helpers.commands import Command
from tests.helpers.odd_input import damaged, with_odd_value

MOST_LAYERS = 100
"""More than that take their time to be made, whatever they are."""


def break_file(chance: random.Random, path: Path) -> str:
    """Damage a file of a model folder in one of many ways; return what was done."""
    kind = chance.choice(("gone", "empty", "torn", "damaged", "damaged", "folder", "loop", "odd"))
    data = path.read_bytes()
    if kind == "odd":
        if path.suffix == ".json":
            path.write_text(json.dumps(odd_config(chance, json.loads(data))))
        elif path.suffix == ".safetensors":
            size = int.from_bytes(data[:8], "little")
            header = json.dumps(with_odd_value(chance, json.loads(data[8 : 8 + size]))).encode()
            path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
        else:
            path.write_text(
                chance.choice(("{{ x.y.z }}", "{% for %}", "{{ 1 / 0 }}", "{% if", "a"))
            )
    elif kind in ("torn", "damaged"):
        head = 2000 if path.suffix == ".safetensors" and chance.random() < 0.7 else len(data)
        torn = data[: chance.randrange(len(data))]
        path.write_bytes(torn if kind == "torn" else damaged(chance, data[:head]) + data[head:])
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "loop":
            path.symlink_to(path)
    return f"{path.name}: {kind}"


def odd_config(chance: random.Random, config: object) -> object:
    """Return a config with an odd value in it."""
    changed = with_odd_value(chance, config)
    if isinstance(changed, dict):
        layers = changed.get("num_hidden_layers")
        if isinstance(layers, int) and layers > MOST_LAYERS:
            changed["num_hidden_layers"] = MOST_LAYERS
    return changed


def broken_model(chance: random.Random, checkpoint: Path, place: Path) -> tuple[Path, str]:
    """Return the folder of a model with one or two broken files, and what is broken."""
    folder = shutil.copytree(checkpoint, place)
    files = chance.sample(sorted(folder.iterdir()), k=chance.choice((1, 1, 1, 2)))
    return folder, "; ".join(break_file(chance, path) for path in files)


def arguments_for(chance: random.Random, recipe: str, folder: Path, few_rows: str) -> list[str]:
    """Return a command that loads the model."""
    chat = chance.choice(("auto", "false"))
    return [
        chance.choice(("run", "run", "plan")), recipe, "-i", few_rows,
        "--set", f"model.path={folder}", "--set", f"prompt.chat={chat}",
    ]  # fmt: skip


def check(code: int, told: str, folder: Path, broken: str) -> None:
    """Check how a command ended."""
    assert "Traceback" not in told, broken
    assert code in (0, 1, 2), (broken, told)
    if code == 2:
        message = told.split("error: ", 1)[1]
        assert str(folder) in message or "the model's" in message, (broken, told)


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_a_broken_model_is_used_or_refused_by_name(
    cbgen, slow_recipe, few_rows, checkpoint, tmp_path, count
):
    chance = random.Random(f"models {count}")
    for number in range(count):
        folder, broken = broken_model(chance, checkpoint, tmp_path / f"model-{number}")
        done = cbgen(*arguments_for(chance, slow_recipe, folder, few_rows))
        check(done.code, done.err, folder, broken)


@pytest.mark.slow
def test_a_process_with_a_broken_model_ends_as_it_should(
    slow_recipe, few_rows, checkpoint, tmp_path
):
    chance = random.Random("models of processes")
    for number in range(50):
        folder, broken = broken_model(chance, checkpoint, tmp_path / f"model-{number}")
        command = Command(*arguments_for(chance, slow_recipe, folder, few_rows))
        check(command.wait(), command.err.text, folder, broken)
