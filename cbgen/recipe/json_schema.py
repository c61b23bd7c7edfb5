"""The JSON Schema of a recipe, for editors that complete and check YAML."""

from __future__ import annotations

import types
import typing
from typing import Any

from cbgen.generation.fields import GENERATION_FIELDS, GenerationField, Support
from cbgen.recipe.deprecated import DEPRECATED_FIELDS
from cbgen.recipe.field_docs import field_docs
from cbgen.recipe.fields import RecipeField, section_fields, switch_fields
from cbgen.recipe.schema import (
    BATCHING_SECTION,
    GENERATION_SECTION,
    SECTION_ORDER,
    SECTION_SPELLINGS,
    SECTIONS,
    Recipe,
)
from cbgen.values import Annotation, is_union

_SIMPLE_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
}


def recipe_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a recipe; null is allowed where it means unset."""
    definitions = {name: _section(name) for name in SECTION_ORDER}
    properties: dict[str, Any] = {name: {"$ref": f"#/$defs/{name}"} for name in SECTION_ORDER}
    for spelling, name in SECTION_SPELLINGS.items():
        properties[spelling] = {"$ref": f"#/$defs/{name}", "description": f"The same as {name}."}
    for item in switch_fields():
        properties[item.name] = _field(item)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Recipe of cbgen",
        "type": "object",
        "properties": properties,
        "required": ["model"],
        "additionalProperties": False,
        "$defs": definitions,
    }


def _section(name: str) -> dict[str, Any]:
    if name == GENERATION_SECTION:
        description = field_docs(Recipe)["generation"]
        properties: dict[str, Any] = {
            item.name: _generation_field(item) for item in GENERATION_FIELDS.values()
        }
        required: list[str] = []
    else:
        description = (SECTIONS[name].__doc__ or "").partition("\n")[0]
        properties = {item.name: _field(item) for item in section_fields(name)}
        required = [item.name for item in section_fields(name) if item.required]
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
    schema: dict[str, Any] = {"description": item.doc, **_of_type(item.type)}
    if item.required:
        return schema
    schema = {"description": item.doc, **_of_nullable(item.type)}
    return {**schema, "default": item.default}


def _generation_field(item: GenerationField) -> dict[str, Any]:
    if item.support is Support.REFUSED:
        return {"description": f"Not supported yet. {item.doc}", "type": "null"}
    if item.support is Support.NEUTRAL:
        return {"description": f"Not supported yet. {item.doc}", "enum": [*item.neutral, None]}
    schema = _of_nullable(item.type)
    limits = {"minimum": item.at_least, "exclusiveMinimum": item.above, "maximum": item.at_most}
    given = {word: limit for word, limit in limits.items() if limit is not None}
    return {"description": item.doc, **_limited(schema, given)}


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
    members = typing.get_args(annotation) if is_union(annotation) else (annotation,)
    return _of_union(tuple(dict.fromkeys((*members, types.NoneType))))


def _of_union(members: tuple[Any, ...]) -> dict[str, Any]:
    """Return one flat schema where all members are simple or all are choices, else alternatives."""
    choices: list[Any] = []
    for member in members:
        if typing.get_origin(member) is typing.Literal:
            choices.extend(typing.get_args(member))
        elif member is bool:
            choices.extend([True, False])
        elif member is types.NoneType:
            choices.append(None)
        else:
            break
    else:
        return {"enum": choices}
    if all(member in _SIMPLE_TYPES for member in members):
        return {"type": [_SIMPLE_TYPES[member] for member in members]}
    return {"anyOf": [_of_type(member) for member in members]}
