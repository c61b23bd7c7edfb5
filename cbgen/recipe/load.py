"""Read and check a recipe: file or mapping, overrides, then one check for every field.

Every error is a `RecipeError` with the place of the value. Knows no model and no machine.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from cbgen.engine.config import ContinuousBatchingConfig, ModelConfig
from cbgen.errors import RecipeError, UsageError
from cbgen.generation.check import FieldError, check_generation_fields, run_seed
from cbgen.generation.fields import GENERATION_FIELDS, GENERATION_SECTION, nearest_field
from cbgen.recipe.digest import recipe_digest
from cbgen.recipe.overrides import apply_override, rename_spellings
from cbgen.recipe.schema import (
    BATCHING_SECTION,
    SECTION_ORDER,
    SECTION_SPELLINGS,
    SECTIONS,
    SWITCHES,
    OutputConfig,
    PromptConfig,
    Recipe,
    default_of,
)
from cbgen.recipe.yaml import Path, Place, Tree, read_recipe_file
from cbgen.values import Plain, admits_none, convert, nearest_name, plain_copy, show

Section = TypeVar("Section")

_MOST_LISTED = 12
"""Known keys that an error may list where none of them is near."""


def load_recipe(path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and check it.

    Args:
        path: the YAML file, named in errors as it is given here.
        overrides: texts of `--set`, `section.key=value`; they win over the file.

    Raises:
        RecipeError: anything is wrong with the file, a value in it or an override.
    """
    return _check(read_recipe_file(path), overrides)


def recipe_from_mapping(mapping: Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """Check a recipe that is a mapping of sections, as `load_recipe` does for a file.

    Raises:
        RecipeError: anything is wrong with a value or an override.
    """
    if not isinstance(mapping, Mapping):
        raise RecipeError(f"expected a mapping of sections, got {show(mapping)}")
    try:
        values = plain_copy(mapping)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    return _check(Tree(values, {}, Place()), overrides)


def _check(tree: Tree, overrides: Sequence[str]) -> Recipe:
    rename_spellings(tree)
    for text in overrides:
        apply_override(tree, text)
    for name, value in tree.values.items():
        if name not in (*SECTION_ORDER, *SWITCHES):
            raise tree.place((name,)).error(_unknown_key((name,), value))
    switches = _typed(tree, (), {name: tree.values.get(name) for name in SWITCHES}, Recipe)
    if switches.get("deterministic") is True:
        place = tree.place(("deterministic",))
        raise place.error("deterministic = true is not supported yet; remove it")
    recipe = Recipe(
        model=_section(tree, "model", ModelConfig),
        prompt=_section(tree, "prompt", PromptConfig),
        generation_config=_generation(tree),
        continuous_batching_config=_section(tree, BATCHING_SECTION, ContinuousBatchingConfig),
        output=_section(tree, "output", OutputConfig),
        **switches,
        digest="",
        origins=_origins(tree),
    )
    _check_run_seed(tree, recipe)
    return dataclasses.replace(recipe, digest=recipe_digest(recipe))


def _section(tree: Tree, name: str, cls: type[Section]) -> Section:
    values = _typed(tree, (name,), tree.section(name), cls)
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        if item.name not in values and default_of(item) is dataclasses.MISSING:
            key = f"{name}.{item.name}"
            raise tree.place((name, item.name)).error(f"{key} is missing; a recipe must give it")
    try:
        return cls(**values)
    except UsageError as error:
        raise _placed(error, tree, name) from error


def _placed(error: UsageError, tree: Tree, section: str) -> RecipeError:
    """Return the error of a section's class with the place of the first key that its text names."""
    message = str(error).removeprefix(f"{section}.")
    words = re.findall(r"\w+", message)
    key = next((word for word in words if word in _known_names(section)), None)
    if key is None:
        return tree.place((section,)).error(f"{section}: {message}")
    return tree.place((section, key)).error(f"{section}.{message}")


def _typed(tree: Tree, path: Path, values: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """Return the given values in the types of the class; null leaves a field at its default."""
    hints = typing.get_type_hints(cls)
    typed = {}
    for key, value in values.items():
        here = (*path, key)
        if key not in hints:
            raise tree.place(here).error(_unknown_key(here, value))
        if value is None and not admits_none(hints[key]):
            continue
        try:
            typed[key] = convert(value, hints[key])
        except ValueError as error:
            raise tree.place(here).error(f"{'.'.join(here)}: {error}") from error
    return typed


def _generation(tree: Tree) -> dict[str, Any]:
    section = tree.section(GENERATION_SECTION)
    for key, value in section.items():
        if key not in GENERATION_FIELDS:
            path = (GENERATION_SECTION, key)
            raise tree.place(path).error(_unknown_key(path, value))
    try:
        return check_generation_fields(section)
    except FieldError as error:
        place = tree.place((GENERATION_SECTION, error.field))
        raise place.error(f"{GENERATION_SECTION}.{error}") from error


def _check_run_seed(tree: Tree, recipe: Recipe) -> None:
    given = recipe.generation_config.get("seed")
    place = str(tree.place((BATCHING_SECTION, "seed")))
    try:
        run_seed(given, recipe.continuous_batching_config.seed, place)
    except FieldError as error:
        seed = tree.place((GENERATION_SECTION, "seed"))
        raise seed.error(f"{GENERATION_SECTION}.{error}") from error


def _known_names(section: str) -> tuple[str, ...]:
    if section == GENERATION_SECTION:
        return tuple(GENERATION_FIELDS)
    return tuple(item.name for item in dataclasses.fields(SECTIONS[section]))


def _unknown_key(path: Path, value: Plain) -> str:
    """Return the message for an unknown key, with the known name that it may stand for."""
    key = path[-1]
    top_level = (*SECTION_ORDER, *SWITCHES, *SECTION_SPELLINGS)
    siblings = top_level if len(path) == 1 else _known_names(path[0])
    homes = [f"{name}.{key}" for name in SECTION_ORDER if key in _known_names(name)]
    if homes:
        nearest: str | None = homes[0]
    elif path[0] == GENERATION_SECTION and len(path) > 1:
        nearest = nearest_field(key)
    else:
        nearest = nearest_name(key, siblings)
    hint = ""
    if nearest is not None:
        hint = f"; did you mean {nearest}?"
    elif len(siblings) <= _MOST_LISTED:
        hint = f"; known: {', '.join(siblings)}"
    return f"{'.'.join(path)} is not a known key (value {show(value)}){hint}"


def _origins(tree: Tree) -> dict[str, str]:
    origins = {name: str(tree.place((name,))) for name in SWITCHES if name in tree.values}
    for name in SECTION_ORDER:
        origins.update(
            {f"{name}.{key}": str(tree.place((name, key))) for key in tree.section(name)}
        )
    return origins
