"""What describes a recipe to people and editors, made from the fields of `cbgen.recipe.schema`.

The JSON Schema (`cbgen schema`), the recipe to start from (`cbgen init`), and the page
docs/recipe.md, which `python -m cbgen.recipe.describe` writes to stdout.
"""

from __future__ import annotations

import math
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from cbgen.generation.fields import GENERATION_FIELDS, GENERATION_SECTION, Field, Support
from cbgen.recipe.schema import (
    BATCHING_SECTION,
    DEPRECATED_FIELDS,
    SECTION_ORDER,
    SECTION_SPELLINGS,
    SECTIONS,
    Recipe,
    RecipeField,
    field_docs,
    section_fields,
    switch_fields,
)
from cbgen.values import Annotation, Plain, describe, is_union, members, show_yaml

_SIMPLE_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
}

_STARTER_VALUES = {"path": "HuggingFaceTB/SmolLM2-135M-Instruct", "max_new_tokens": 256}
"""Fields that the starter recipe sets."""
_COMMENT_COLUMN = 40
_PAGE_WIDTH = 100

_INTRODUCTION = """\
<!-- Made by `python -m cbgen.recipe.describe > docs/recipe.md`; change the field docs instead. -->

# Recipe

A recipe is one YAML file: a mapping of the sections below. `cbgen init` writes one to start from,
`cbgen schema` prints a JSON Schema for editors. Only `model.path` must be given.

- A file is read as YAML 1.2: `yes`, `no`, `on` and `off` are text, `1e-4` is a number, tabs do not
  indent. Anchors, aliases and `<<` work.
- `null` means unset. To turn something off, give the value that the table names: `top_k: 0`.
- An unknown or repeated key, a value of a wrong type or out of range, and whatever this version
  does not support end the command with exit code 2 and a line such as
  `recipe.yaml:7: output.ordr is not a known key (value "input"); did you mean order?`
- `--set section.key=value` wins over the file and may be given often; the value is YAML, and the
  key may go into a mapping: `--set model.config_overrides.sliding_window=4096`.
- `GenerationConfig` and `ContinuousBatchingConfig` are other spellings of the two section names.
"""

_GENERATION = """\
The names and meanings are those of `transformers.GenerationConfig`, then come cbgen's own. A row's
`generation_config` may hold the same fields. A setting is off unless row, recipe or model turns it
on. `do_sample: false` beside a temperature other than 0 or 1 is refused.
"""

_NOT_SUPPORTED = """\
Not supported yet: each of these is refused by name, unless it is null or has a value given here.
"""


def starter_recipe() -> str:
    """Return the text of a recipe that runs as it is and shows every field that may be given."""
    lines = [
        "# A recipe of cbgen: cbgen run THIS_FILE -i prompts.jsonl -o answers.jsonl",
        "# A line that begins with # shows a default; take the # away and change the value.",
        "",
    ]
    for section in SECTION_ORDER:
        lines.append(f"{section}:")
        if section == GENERATION_SECTION:
            fields = [(item.name, None, item.doc) for item in _with_support(Support.HONOURED)]
        else:
            fields = [(item.name, item.default, item.doc) for item in section_fields(section)]
        lines.extend(_starter_line("  ", *field) for field in fields)
        lines.append("")
    lines.extend(_starter_line("", item.name, item.default, item.doc) for item in switch_fields())
    return "\n".join(lines) + "\n"


def _starter_line(indent: str, name: str, default: Plain, doc: str) -> str:
    mark = "" if name in _STARTER_VALUES else "# "
    value = show_yaml(_STARTER_VALUES.get(name, default))
    return f"{indent}{mark}{name}: {value}".ljust(_COMMENT_COLUMN) + f"  # {doc}"


def recipe_reference() -> str:
    """Return the page docs/recipe.md: every field of a recipe in tables."""
    parts = [_INTRODUCTION + _deprecated_line()]
    for section in SECTION_ORDER:
        parts.append(f"## {section}\n")
        if section == GENERATION_SECTION:
            parts.extend(_generation_tables())
        else:
            parts.append(_field_table(section_fields(section)))
    parts.append("## Outside of sections\n")
    parts.append(_field_table(switch_fields()))
    return "\n".join(parts)


def _deprecated_line() -> str:
    """Return the item of the introduction about deprecated fields."""
    names = [
        f"`{old}` ({'nothing' if new is None else f'now `{new}`'})"
        for old, new in DEPRECATED_FIELDS.items()
    ]
    line = f"- {', '.join(names[:-1])} and {names[-1]} are accepted with a warning."
    return textwrap.fill(line, 100, subsequent_indent="  ", break_on_hyphens=False) + "\n"


def _field_table(fields: Iterable[RecipeField]) -> str:
    rows = [
        (
            item.name,
            describe(item.type),
            "(required)" if item.is_required else _code(item.default),
            item.doc,
        )
        for item in fields
    ]
    return _table(("field", "value", "default", "meaning"), rows)


def _generation_tables() -> Iterator[str]:
    yield _GENERATION
    rows = [(item.name, _value_words(item), item.doc) for item in _with_support(Support.HONOURED)]
    yield _table(("field", "value", "meaning"), rows)
    yield _NOT_SUPPORTED
    rows = [
        (item.name, ", ".join(_code(value) for value in item.neutral), item.doc)
        for item in _with_support(Support.NEUTRAL, Support.REFUSED)
    ]
    yield _table(("field", "accepted", "what it would ask for"), rows)
    names = ", ".join(f"`{item.name}`" for item in _with_support(Support.NO_EFFECT))
    yield textwrap.fill(f"Accepted and without effect: {names}.", _PAGE_WIDTH) + "\n"


def _with_support(*support: Support) -> list[Field]:
    return [item for item in GENERATION_FIELDS.values() if item.support in support]


def _value_words(item: Field) -> str:
    limits = str(item.range)
    return f"{describe(item.type)}, {limits}" if limits else describe(item.type)


def _code(value: object) -> str:
    return f"`{show_yaml(value)}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *((f"`{name}`", *cells) for name, *cells in rows)]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def recipe_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a recipe; null is allowed where it means unset."""
    properties: dict[str, Any] = {name: {"$ref": f"#/$defs/{name}"} for name in SECTION_ORDER}
    for spelling, name in SECTION_SPELLINGS.items():
        properties[spelling] = {"$ref": f"#/$defs/{name}", "description": f"The same as {name}."}
    properties.update({item.name: _field(item) for item in switch_fields()})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Recipe of cbgen",
        "type": "object",
        "properties": properties,
        "required": ["model"],
        "additionalProperties": False,
        "$defs": {name: _section(name) for name in SECTION_ORDER},
    }


def _section(name: str) -> dict[str, Any]:
    required: list[str] = []
    if name == GENERATION_SECTION:
        description = field_docs(Recipe)[name]
        properties = {item.name: _generation_field(item) for item in GENERATION_FIELDS.values()}
    else:
        description = (SECTIONS[name].__doc__ or "").partition("\n")[0]
        properties = {item.name: _field(item) for item in section_fields(name)}
        required = [item.name for item in section_fields(name) if item.is_required]
    if name == BATCHING_SECTION:
        properties.update({old: _deprecated(new) for old, new in DEPRECATED_FIELDS.items()})
    schema: dict[str, Any] = {
        "description": description,
        "type": "object" if required else ["object", "null"],
        "properties": properties,
        "additionalProperties": False,
    }
    return {**schema, "required": required} if required else schema


def _deprecated(replacement: str | None) -> dict[str, Any]:
    advice = "It has no effect." if replacement is None else f"Use {replacement}."
    return {"description": f"Deprecated. {advice}", "deprecated": True}


def _field(item: RecipeField) -> dict[str, Any]:
    if item.is_required:
        return {"description": item.doc, **_of_type(item.type)}
    return {"description": item.doc, **_of_nullable(item.type), "default": item.default}


def _generation_field(item: Field) -> dict[str, Any]:
    if item.support is Support.REFUSED:
        return {"description": f"Not supported yet. {item.doc}", "type": "null"}
    if item.support is Support.NEUTRAL:
        return {"description": f"Not supported yet. {item.doc}", "enum": [*item.neutral, None]}
    allowed = item.range
    limits = {
        "minimum": allowed.at_least,
        "exclusiveMinimum": allowed.above,
        "maximum": allowed.at_most,
    }
    given = {word: limit for word, limit in limits.items() if math.isfinite(limit)}
    return {"description": item.doc, **_limited(_of_nullable(item.type), given)}


def _limited(schema: dict[str, Any], limits: dict[str, float]) -> dict[str, Any]:
    """Put limits of numbers where the numbers are: here, in the items of lists, in alternatives."""
    if "anyOf" in schema:
        return {"anyOf": [_limited(choice, limits) for choice in schema["anyOf"]]}
    if "items" in schema:
        return {**schema, "items": _limited(schema["items"], limits)}
    return {**schema, **limits}


def _of_type(annotation: Annotation) -> dict[str, Any]:
    """Return the schema of a type annotation."""
    if annotation is Any:
        return {}
    if annotation in _SIMPLE_TYPES:
        return {"type": _SIMPLE_TYPES[annotation]}
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if is_union(annotation):
        return _of_union(arguments)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is dict:
        return {"type": "object"}
    schema: dict[str, Any] = {"type": "array", "items": _of_type(arguments[0])}
    if origin is tuple and arguments[-1] is not Ellipsis:
        schema |= {"minItems": len(arguments), "maxItems": len(arguments)}
    return schema


def _of_nullable(annotation: Annotation) -> dict[str, Any]:
    """Return the schema of a type annotation or null."""
    return _of_union(tuple(dict.fromkeys((*members(annotation), types.NoneType))))


def _of_union(kinds: tuple[Any, ...]) -> dict[str, Any]:
    """Return one flat schema where all members are simple or all are choices, else alternatives."""
    choices: list[Any] = []
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            choices.extend(typing.get_args(kind))
        elif kind is bool:
            choices.extend([True, False])
        elif kind is types.NoneType:
            choices.append(None)
        else:
            break
    else:
        return {"enum": choices}
    if all(kind in _SIMPLE_TYPES for kind in kinds):
        return {"type": [_SIMPLE_TYPES[kind] for kind in kinds]}
    return {"anyOf": [_of_type(kind) for kind in kinds]}


if __name__ == "__main__":
    sys.stdout.write(recipe_reference())
