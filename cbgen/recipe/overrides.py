"""`--set section.key=value`: one value of a recipe from the command line."""

from __future__ import annotations

from cbgen.errors import RecipeError
from cbgen.recipe.deprecated import rename_field
from cbgen.recipe.fields import section_fields
from cbgen.recipe.schema import SECTION_ORDER, SECTIONS, SWITCHES
from cbgen.recipe.tree import Place, Tree
from cbgen.recipe.yaml_tree import parse_value
from cbgen.values import Plain


def apply_override(tree: Tree, text: str) -> None:
    """Put one override into a recipe; a later one of the same key wins.

    The text is `section.key=value` or `switch=value`; the key may go into mappings. The value is
    YAML, but where the field takes text alone and the YAML is anything else, it is the text itself:
    `prompt.template=Q: {question}` means what it seems to.

    Raises:
        RecipeError: the text has another form; the message begins with `--set` and the text.
    """
    place = Place(override=text)
    name, equals, value_text = text.partition("=")
    path = tuple(part.strip() for part in name.split("."))
    if not equals or not all(path):
        raise place.error("expected section.key=value")
    renamed = rename_field(path, _parse(path, value_text, place), place)
    if renamed is None:
        return
    path, value = renamed
    if len(path) == 1 and path[0] not in SWITCHES:
        sections = ", ".join(SECTION_ORDER)
        raise place.error(f"expected section.key=value with one of the sections {sections}")
    tree.put(path, value, place)


def _parse(path: tuple[str, ...], text: str, place: Place) -> Plain:
    try:
        value = parse_value(text, place)
    except RecipeError:
        if _takes_text_alone(path):
            return text
        raise
    if value is None or isinstance(value, str) or not _takes_text_alone(path):
        return value
    return text


def _takes_text_alone(path: tuple[str, ...]) -> bool:
    if len(path) != 2 or path[0] not in SECTIONS:
        return False
    annotations = {field.name: field.type for field in section_fields(path[0])}
    return annotations.get(path[1]) in (str, str | None)
