"""`--set section.key=value`: one value of a recipe from the command line."""

from __future__ import annotations

from cbgen.recipe.deprecated import rename_field
from cbgen.recipe.schema import SECTION_ORDER, SWITCHES
from cbgen.recipe.tree import Place, Tree
from cbgen.recipe.yaml_tree import parse_value


def apply_override(tree: Tree, text: str) -> None:
    """Put one override into a recipe; a later one of the same key wins.

    The text is `section.key=value` or `switch=value`; the value is YAML, and the key may go into
    mappings.

    Raises:
        RecipeError: the text has another form; the message begins with `--set` and the text.
    """
    place = Place(override=text)
    name, equals, value_text = text.partition("=")
    path = tuple(part.strip() for part in name.split("."))
    if not equals or not all(path):
        raise place.error("expected section.key=value")
    renamed = rename_field(path, parse_value(value_text, place), place)
    if renamed is None:
        return
    path, value = renamed
    if len(path) == 1 and path[0] not in SWITCHES:
        sections = ", ".join(SECTION_ORDER)
        raise place.error(f"expected section.key=value with one of the sections {sections}")
    tree.put(path, value, place)
