"""What a recipe says, in one form and as one short hash.

For deciding whether a run may go on with its output, and for saying what has changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from cbgen.recipe.schema import Recipe, default_of
from cbgen.values import show_yaml


def recipe_digest(recipe: Recipe) -> str:
    """Return 32 hex digits for the content of a recipe.

    Fields at their defaults do not count, so that a new field changes no digest.
    """
    text = json.dumps(recipe_values(recipe), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def recipe_values(recipe: Recipe) -> dict[str, Any]:
    """Return what a recipe says beyond the defaults, as JSON values under its sections' names."""
    said = _said(dataclasses.replace(recipe, digest="", origins={}))
    values: dict[str, Any] = json.loads(json.dumps(said))
    return values


def recipe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return in words each field that differs between the values of two recipes."""
    old, new = _flat(before), _flat(now)
    names = dict.fromkeys([*old, *new])
    return [
        f"{name} was {_shown(old.get(name))} and is {_shown(new.get(name))}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, held in values.items():
        if isinstance(held, dict):
            flat |= {f"{section}.{name}": value for name, value in held.items()}
        else:
            flat[section] = held
    return flat


def _shown(value: object) -> str:
    return "not given" if value is None else show_yaml(value)


def _said(value: object) -> object:
    if not dataclasses.is_dataclass(value):
        return value
    given = ((item, getattr(value, item.name)) for item in dataclasses.fields(value))
    return {item.name: _said(held) for item, held in given if held != default_of(item)}
