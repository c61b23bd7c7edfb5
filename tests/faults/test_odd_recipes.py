"""Whatever a recipe holds, the command answers rows or says what is wrong, and where."""

from __future__ import annotations

import json
import random
import typing
from pathlib import Path
from typing import Any

import pytest

from cbgen.generation.fields import GENERATION_FIELDS, GENERATION_SECTION
from cbgen.recipe.schema import BATCHING_SECTION, SECTIONS, SWITCHES, section_fields
from cbgen.values import members
from tests.helpers.commands import Command
from tests.helpers.odd_input import ODD_NUMBERS, ODD_TEXTS, damaged, odd_value

FIELDS = {
    **{name: {field.name: field.type for field in section_fields(name)} for name in SECTIONS},
    GENERATION_SECTION: {name: field.type for name, field in GENERATION_FIELDS.items()},
}
YAML_TEXTS = (
    "!!int x", "!!float {}", "!!python/object:os.system {}", "!!binary aGk=", "!!set {a}",
    "&a [*a]", "&a {b: *a}", "*a", "&a", "<<: *a", "{<<: 5}", "? [a]\n: b", "|\n  x", "---",
    "- x", "\t", '"\\ud800"', '"\\udc00\\ud800"', '"\\x"', "'", "0x1_0", "1:30", "2001-01-01", "=",
    "9" * 5000, "0x" + "f" * 900, ".inf", "-.nan", "@", "`", "%", "%YAML 9", "[" * 2000,
    "{a: " * 60, "[1, [2, [3]]]", "# x", "\u2028", "\x85", "\ufeff", "~", "no", "010", "1e400",
)  # fmt: skip


def odd_recipe(chance: random.Random, checkpoint: Path) -> bytes:
    """Return the bytes of a recipe of which something is odd, most often the value of a field."""
    recipe: dict[str, Any] = {
        "model": {"path": str(checkpoint)},
        "prompt": {"chat": False},
        GENERATION_SECTION: {"max_new_tokens": 2},
        BATCHING_SECTION: {"num_blocks": 64, "page_size": 16, "max_requests_per_batch": 4},
        "output": {"order": "input"},
    }
    texts = {}
    for number in range(chance.choice((0, 1, 1, 1, 2, 3))):
        section = chance.choice(list(FIELDS))
        key = chance.choice(list(FIELDS[section]))
        kind = chance.random()
        if kind < 0.7:
            recipe[section][key] = value_of(chance, FIELDS[section][key])
        elif kind < 0.8:
            recipe[section][key] = odd_value(chance)
        elif kind < 0.95:
            recipe[section][key] = f"text {number}"
            texts[f'"text {number}"'] = chance.choice(YAML_TEXTS)
        else:
            recipe[section][chance.choice((key[1:], key.upper(), key + key))] = 1
    if chance.random() < 0.1:
        recipe[chance.choice((*recipe, *SWITCHES))] = odd_value(chance)
    text = ""
    for name, section in recipe.items():
        if isinstance(section, dict) and section:
            fields = [f"  {key}: {yaml(value)}\n" for key, value in section.items()]
            text += f"{name}:\n" + "".join(fields)
        else:
            text += f"{name}: {yaml(section)}\n"
    for mark, odd in texts.items():
        text = text.replace(mark, odd)
    data = text.encode("utf-8", "surrogatepass")
    parts = [part.encode() for part in YAML_TEXTS]
    return damaged(chance, data, parts) if chance.random() < 0.15 else data


def value_of(chance: random.Random, annotation: Any) -> Any:
    """Return a value of a type, or one that is nearly of it."""
    kind = chance.choice(members(annotation))
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Literal:
        return chance.choice(arguments)
    if origin in (list, tuple):
        return [value_of(chance, arguments[0]) for _ in range(chance.choice((0, 1, 1, 3, 200)))]
    if origin is dict:
        return {chance.choice(ODD_TEXTS): odd_value(chance) for _ in range(3)}
    if origin is bool:
        return chance.random() < 0.5
    if origin in (int, float):
        numbers = [number for number in ODD_NUMBERS if isinstance(number, origin)]
        return chance.choice((chance.choice(numbers), chance.randrange(300)))
    return chance.choice(ODD_TEXTS) if origin is str else odd_value(chance)


def yaml(value: object) -> str:
    """Return a value as YAML on one line."""
    try:
        text = json.dumps(value)
    except ValueError:  # an integer that Python shows nobody
        return "1" + "0" * 5000
    return text.replace("-Infinity", "-.inf").replace("Infinity", ".inf").replace("NaN", ".nan")


def check(code: int, told: str, path: Path) -> None:
    """Check how a command ended that was given the recipe at `path`."""
    assert "Traceback" not in told
    assert code in (0, 1, 2)
    if code == 2:
        assert path.name in told


def arguments_for(number: int, path: Path, few_rows: str, tmp_path: Path) -> list[str]:
    """Plan, and run where a plan says nothing of what a run does."""
    if number % 2:
        return ["plan", str(path), "-i", few_rows]
    return ["run", str(path), "-i", few_rows, "-o", str(tmp_path / "out.jsonl"), "--overwrite"]


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_an_odd_recipe_is_used_or_refused_by_name(cbgen, checkpoint, few_rows, tmp_path, count):
    chance = random.Random(f"recipes {count}")
    for number in range(count):
        path = tmp_path / f"recipe-{number}.yaml"
        path.write_bytes(odd_recipe(chance, checkpoint))
        done = cbgen(*arguments_for(number, path, few_rows, tmp_path))
        check(done.code, done.err, path)


@pytest.mark.slow
def test_a_process_with_an_odd_recipe_ends_as_it_should(checkpoint, few_rows, tmp_path):
    chance = random.Random("recipes of processes")
    for number in range(50):
        path = tmp_path / f"recipe-{number}.yaml"
        path.write_bytes(odd_recipe(chance, checkpoint))
        command = Command(*arguments_for(number, path, few_rows, tmp_path))
        check(command.wait(), command.err.text, path)
