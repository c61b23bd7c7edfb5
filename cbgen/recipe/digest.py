"""One short hash of what a recipe says, for deciding whether a run may go on with its output."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from cbgen.recipe.schema import Recipe


def recipe_digest(recipe: Recipe) -> str:
    """Return 32 hex digits for the content of a recipe.

    Fields at their defaults do not count, so that a new field changes no digest.
    """
    text = json.dumps(_said(dataclasses.replace(recipe, digest="", origins={})), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _said(value: object) -> object:
    if not dataclasses.is_dataclass(value):
        return value
    given = ((item, getattr(value, item.name)) for item in dataclasses.fields(value))
    return {item.name: _said(held) for item, held in given if held != default_of(item)}


def default_of(item: dataclasses.Field[Any]) -> object:
    """Return the default of a field, `dataclasses.MISSING` where it has none."""
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default
