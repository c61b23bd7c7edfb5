"""Which type a column of a parquet file gets, from the JSON values that it shall hold.

A type is `null`, `bool`, `int`, `long` (beyond what a float holds), `float`, `text`, `json`, a list
or an object. Values that have no common type, or whose objects differ in keys, are stored as JSON
text. Knows nothing of parquet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cbgen.io.json_values import ExactFloat

_EXACT_IN_FLOAT = 2**53
_LARGEST = 2**63
_MAX_LEVELS = 8


@dataclass(frozen=True, slots=True)
class ListType:
    """A list."""

    item: ColumnType


@dataclass(frozen=True, slots=True)
class ObjectType:
    """An object with these keys, at least one."""

    fields: tuple[tuple[str, ColumnType], ...]


ColumnType = str | ListType | ObjectType


def type_of(value: object, levels: int = _MAX_LEVELS) -> ColumnType:
    """Return the narrowest type that holds a value exactly; one nested deeper is JSON text."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        if abs(value) <= _EXACT_IN_FLOAT:
            return "int"
        return "long" if -_LARGEST <= value < _LARGEST else "json"
    if isinstance(value, float):
        return "json" if isinstance(value, ExactFloat) else "float"
    if isinstance(value, str):
        return "text"
    if levels == 0:
        return "json"
    if isinstance(value, list):
        item: ColumnType = "null"
        for element in value:
            item = common_type(item, type_of(element, levels - 1))
        return "json" if item == "json" else ListType(item)
    assert isinstance(value, Mapping), "JSON has no other values"
    return _object_type({key: type_of(held, levels - 1) for key, held in value.items()})


def common_type(first: ColumnType, second: ColumnType) -> ColumnType:
    """Return the narrowest type that holds values of both types."""
    if first == second or second == "null":
        return first
    if first == "null":
        return second
    if isinstance(first, str) and isinstance(second, str):
        both = {first, second}
        if both == {"int", "long"}:
            return "long"
        return "float" if both == {"int", "float"} else "json"
    if isinstance(first, ListType) and isinstance(second, ListType):
        item = common_type(first.item, second.item)
        return "json" if item == "json" else ListType(item)
    if isinstance(first, ObjectType) and isinstance(second, ObjectType):
        return _common_object(dict(first.fields), dict(second.fields))
    return "json"


def _common_object(first: dict[str, ColumnType], second: dict[str, ColumnType]) -> ColumnType:
    if first.keys() != second.keys():
        return "json"
    return _object_type({key: common_type(kind, second[key]) for key, kind in first.items()})


def _object_type(fields: dict[str, ColumnType]) -> ColumnType:
    return "json" if not fields or "json" in fields.values() else ObjectType(tuple(fields.items()))
