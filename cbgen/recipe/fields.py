"""All fields of a recipe as plain facts: name, type, default, documentation, choices.

What the JSON Schema, the reference page and the starter recipe are made from.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass

from cbgen.engine.config import ATTENTION_BACKENDS, DTYPES, QUANTIZATIONS, SCHEDULER_TYPES
from cbgen.recipe.digest import default_of
from cbgen.recipe.field_docs import field_docs
from cbgen.recipe.schema import SECTIONS, SWITCHES, Recipe
from cbgen.values import Annotation, Plain

_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": DTYPES,
    "attn_implementation": ATTENTION_BACKENDS,
    "quantization": QUANTIZATIONS,
    "scheduler_type": SCHEDULER_TYPES,
}
"""Choices of fields whose annotation is only `str`, or that or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeField:
    """One field that a user may give."""

    name: str
    type: Annotation
    default: Plain
    """`dataclasses.MISSING` for a field that must be given."""
    doc: str

    @property
    def required(self) -> bool:
        """Whether a recipe without the field is refused."""
        return self.default is dataclasses.MISSING


def section_fields(section: str) -> Iterator[RecipeField]:
    """Yield the fields of a section that is a dataclass, in order."""
    return _fields(SECTIONS[section])


def switch_fields() -> Iterator[RecipeField]:
    """Yield the fields that stand outside of any section."""
    return (item for item in _fields(Recipe) if item.name in SWITCHES)


def _fields(cls: type) -> Iterator[RecipeField]:
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        yield RecipeField(
            name=item.name,
            type=_type(item.name, hints[item.name]),
            default=default_of(item),
            doc=field_docs(cls)[item.name],
        )


def _type(name: str, hint: Annotation) -> Annotation:
    choices = _CHOICES.get(name)
    if choices is None:
        return hint
    if type(None) in typing.get_args(hint):
        return typing.Optional[typing.Literal[choices]]  # noqa: UP045  `|` is not known to mypy here
    return typing.Literal[choices]
