"""Changes to a recipe before it is checked: `--set section.key=value`, and old names made new.

A section or field has one name of today. Other spellings become that name, deprecated ones with a
warning, in the file as well as in an override.
"""

from __future__ import annotations

import logging

from cbgen.errors import RecipeError
from cbgen.recipe.schema import (
    BATCHING_SECTION,
    DEPRECATED_FIELDS,
    SECTION_ORDER,
    SECTION_SPELLINGS,
    SECTIONS,
    SWITCHES,
    section_fields,
)
from cbgen.recipe.yaml import Path, Place, Tree, parse_value
from cbgen.values import Plain, refuse_unwritable, show

logger = logging.getLogger(__name__)

_HIGHEST_COMPILE_LEVEL = 3


def apply_override(tree: Tree, text: str) -> None:
    """Put one override into a recipe; a later one of the same key wins.

    The text is `section.key=value` or `switch=value`; the key may go into mappings. The value is
    YAML. A field that takes text alone gets the text itself where the YAML is something else:
    `prompt.template=Q: {question}` means what it seems to.

    Raises:
        RecipeError: the text has another form; the message begins with `--set` and the text.
    """
    place = Place(override=text)
    name, equals, value_text = text.partition("=")
    path = tuple(part.strip() for part in name.split("."))
    if not equals or not all(path):
        raise place.error("expected section.key=value")
    renamed = _rename_field(path, _parse(path, value_text, place), place)
    if renamed is None:
        return
    path, value = renamed
    if len(path) == 1 and path[0] not in SWITCHES:
        sections = ", ".join(SECTION_ORDER)
        raise place.error(f"expected section.key=value with one of the sections {sections}")
    tree.put(path, value, place)


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
        tree.values[name] = tree.values.pop(spelling)
        tree.places = {
            (name, *path[1:]) if path[0] == spelling else path: at
            for path, at in tree.places.items()
        }
    section = tree.section(BATCHING_SECTION)
    for old in [name for name in DEPRECATED_FIELDS if name in section]:
        place = tree.place((BATCHING_SECTION, old))
        renamed = _rename_field((BATCHING_SECTION, old), section.pop(old), place)
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


def _rename_field(path: Path, value: Plain, place: Place) -> tuple[Path, Plain] | None:
    """Return path and value under the name of today, or None if nothing is left of it."""
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


def _parse(path: Path, text: str, place: Place) -> Plain:
    takes_text_alone = False
    if len(path) == 2 and path[0] in SECTIONS:
        types = {field.name: field.type for field in section_fields(path[0])}
        takes_text_alone = types.get(path[1]) in (str, str | None)
    try:
        value = parse_value(text, place)
    except RecipeError:
        if not takes_text_alone:
            raise
        try:
            refuse_unwritable(text)
        except ValueError as error:
            raise place.error(str(error)) from None
        return text
    is_other = value is not None and not isinstance(value, str)
    return text if takes_text_alone and is_other else value
