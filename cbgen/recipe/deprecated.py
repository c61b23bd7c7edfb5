"""Other spellings and deprecated names: each becomes the name of today, the old with a warning."""

from __future__ import annotations

import logging

from cbgen.recipe.schema import BATCHING_SECTION, SECTION_SPELLINGS
from cbgen.recipe.tree import Path, Place, Tree
from cbgen.values import Plain, show

logger = logging.getLogger(__name__)

_HIGHEST_COMPILE_LEVEL = 3

DEPRECATED_FIELDS = {
    "block_size": "page_size",
    "use_default_compile_configs": "default_compile_level",
    "max_cached_graphs": None,
}
"""Deprecated fields of continuous_batching_config and what replaces them; None: nothing does."""


def rename_spellings(tree: Tree) -> None:
    """Give sections and deprecated fields of a recipe their names of today.

    Raises:
        RecipeError: a section or field is there under both names and the two disagree.
    """
    for spelling, name in SECTION_SPELLINGS.items():
        if spelling not in tree.values:
            continue
        place = tree.place((spelling,))
        if name in tree.values:
            other = tree.place((name,))
            raise place.error(f"{spelling} is another name of {name} (given at {other}); keep one")
        tree.rename_section(spelling, name)
    section = tree.section(BATCHING_SECTION)
    for old in [name for name in DEPRECATED_FIELDS if name in section]:
        place = tree.place((BATCHING_SECTION, old))
        renamed = rename_field((BATCHING_SECTION, old), tree.pop((BATCHING_SECTION, old)), place)
        if renamed is None:
            continue
        path, value = renamed
        name = path[-1]
        if section.get(name) not in (None, value):
            raise place.error(
                f"{BATCHING_SECTION}.{old} is the old name of {name} and asks for {show(value)}, "
                f"but {name} is {show(section[name])}; keep one"
            )
        tree.put(path, value, place)


def rename_field(path: Path, value: Plain, place: Place) -> tuple[Path, Plain] | None:
    """Return path and value under the name of today, or None where nothing is left of the field."""
    path = (SECTION_SPELLINGS.get(path[0], path[0]), *path[1:])
    if path[0] != BATCHING_SECTION or len(path) != 2 or path[1] not in DEPRECATED_FIELDS:
        return path, value
    old, new = path[1], DEPRECATED_FIELDS[path[1]]
    name = f"{BATCHING_SECTION}.{old}"
    if new is None:
        logger.warning("%s: %s is deprecated and has no effect; remove it", place, name)
        return None
    logger.warning("%s: %s is deprecated; use %s", place, name, new)
    if value is None:
        return None
    if old == "use_default_compile_configs":
        if not isinstance(value, bool):
            raise place.error(f"{name}: expected true or false, got {show(value)}")
        value = _HIGHEST_COMPILE_LEVEL if value else 0
    return (BATCHING_SECTION, new), value
