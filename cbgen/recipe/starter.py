"""The recipe to start from: a model, a length, and every other field as a comment."""

from __future__ import annotations

from collections.abc import Iterator

from cbgen.generation.fields import GENERATION_FIELDS, Support
from cbgen.recipe.fields import RecipeField, section_fields, switch_fields
from cbgen.recipe.schema import GENERATION_SECTION, SECTION_ORDER
from cbgen.values import show_yaml

_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_MAX_NEW_TOKENS = 256
_COLUMN = 40
"""Where comments begin."""


def starter_recipe() -> str:
    """Return the text of a recipe that runs as it is and shows every field that may be given."""
    lines = [
        "# A recipe of cbgen: cbgen run THIS_FILE -i prompts.jsonl -o answers.jsonl",
        "# A line that begins with # shows a default; take the # away and change the value.",
        "",
    ]
    for section in SECTION_ORDER:
        lines.append(f"{section}:")
        lines.extend(_generation() if section == GENERATION_SECTION else _section(section))
        lines.append("")
    lines.extend(_line(item.name, item.default, item.doc, mark="# ") for item in switch_fields())
    return "\n".join(lines) + "\n"


def _section(section: str) -> Iterator[str]:
    for item in section_fields(section):
        if item.required:
            yield _line(item.name, _example(item), item.doc, mark="  ")
        else:
            yield _line(item.name, item.default, item.doc, mark="  # ")


def _example(item: RecipeField) -> str:
    assert item.name == "path", f"the starter recipe has no value for {item.name}"
    return _MODEL


def _generation() -> Iterator[str]:
    for item in GENERATION_FIELDS.values():
        if item.name == "max_new_tokens":
            yield _line(item.name, _MAX_NEW_TOKENS, item.doc, mark="  ")
        elif item.support is Support.HONOURED:
            yield _line(item.name, None, item.doc, mark="  # ")


def _line(name: str, value: object, doc: str, *, mark: str) -> str:
    return f"{mark}{name}: {show_yaml(value)}".ljust(_COLUMN) + f"  # {doc}"
