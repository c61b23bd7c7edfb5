"""Plain values: their check against type annotations, ranges, and the words for values and types.

Plain values are text, numbers, true and false, null, lists and mappings. Of fields this module
knows no more than the names that other programs have for some of them.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import re
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Plain: TypeAlias = Any
"""A plain value: null, true or false, a number, text, or a list or mapping of plain values."""
Annotation: TypeAlias = object
"""A type annotation, as `typing.get_type_hints` gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The finite numbers that a setting may be; no bound allows all of them."""

    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf

    def __contains__(self, number: float) -> bool:
        return self.at_least <= number <= self.at_most and self.above < number < math.inf

    def __str__(self) -> str:
        limits = (("at least", self.at_least), ("above", self.above), ("at most", self.at_most))
        return " and ".join(f"{words} {limit}" for words, limit in limits if math.isfinite(limit))


ANY_NUMBER = Range()
_LONGEST_SHOWN = 80
_BARE_TEXT = re.compile(r"[A-Za-z][\w./|-]*")


_SIMPLE_WORDS: dict[Annotation, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    type(None): "null",
    Any: "anything",
}


def show(value: object) -> str:
    """Return a value as JSON, which is YAML too, shortened when it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def show_yaml(value: object) -> str:
    """Return the whole of a plain value as YAML on one line."""
    if (
        isinstance(value, str)
        and _BARE_TEXT.fullmatch(value)
        and value not in ("null", "true", "false")
    ):
        return value
    return json.dumps(value, ensure_ascii=False)


def show_argument(value: object) -> str:
    """Return the words for a wrong argument in Python: its type, and the value if it is short."""
    name = type(value).__name__
    return f"{name} {value!r}" if isinstance(value, str | int | float) else name


def describe(annotation: Annotation) -> str:
    """Return the words for a type annotation, such as `an integer or null`."""
    if annotation in _SIMPLE_WORDS:
        return _SIMPLE_WORDS[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if is_union(annotation):
        return " or ".join(describe(member) for member in arguments)
    if origin is typing.Literal:
        return " or ".join(item if isinstance(item, str) else show(item) for item in arguments)
    if origin is dict:
        return "a mapping"
    several = origin is tuple and arguments[-1] is not Ellipsis
    length = f" of {len(arguments)}" if several else ""
    return f"a list{length} (each {describe(arguments[0])})"


def is_union(annotation: Annotation) -> bool:
    """Return whether an annotation is `A | B`."""
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def members(annotation: Annotation) -> tuple[Any, ...]:
    """Return the types of a union, or the annotation alone."""
    return typing.get_args(annotation) if is_union(annotation) else (annotation,)


def admits_none(annotation: Annotation) -> bool:
    """Return whether null is a value of this type, rather than only a way to leave it unset."""
    return annotation is Any or type(None) in typing.get_args(annotation)


def convert(value: Plain, annotation: Annotation) -> Plain:
    """Return `value` in the annotated type: an integer becomes a float, a list a tuple if wanted.

    Raises:
        ValueError: the value is of another type; the text says what was expected and what was got.
    """
    try:
        return _convert(value, annotation)
    except ValueError:
        hint = ""
        if str in members(annotation) and not isinstance(value, str):
            hint = "; put text in quotes"
        elif isinstance(value, float) and not math.isfinite(value):
            hint = ", which is not finite"
        raise ValueError(f"expected {describe(annotation)}, got {show(value)}{hint}") from None


_SMALLEST, _LARGEST = -(2**63), 2**64 - 1


def refuse_unwritable(value: Plain) -> None:
    """Refuse a number or text that cannot be written as JSON and read by every other program.

    Raises:
        ValueError: it is an integer beyond 64 bits, or text with half of a surrogate pair.
    """
    if isinstance(value, int) and not _SMALLEST <= value <= _LARGEST:
        raise ValueError(f"{show(value)} is beyond 64 bits; give a smaller number, or text")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{value[error.start]!a} is half of a surrogate pair and no character; write "
                "the whole pair or U+FFFD"
            ) from None


def plain_copy(value: Plain) -> Plain:
    """Return a deep copy of plain values, with every sequence a list and every mapping a dict.

    Raises:
        ValueError: an object in it has no YAML form, a key is not text, or `refuse_unwritable`.
    """
    if value is None or isinstance(value, str | bool | int | float):
        refuse_unwritable(value)
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"keys must be text, got {key!r}")
            refuse_unwritable(key)
        return {key: plain_copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_copy(item) for item in value]
    raise ValueError(f"expected plain values (text, numbers, lists, mappings), got {value!r}")


def _convert(value: Plain, annotation: Annotation) -> Plain:
    if annotation is Any or (type(value) is annotation and annotation in (bool, int, str)):
        return value
    if annotation is float:
        return _convert_float(value)
    origin, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if is_union(annotation):
        for member in arguments:
            with contextlib.suppress(ValueError):
                return _convert(value, member)
    elif origin is typing.Literal:
        if any(type(value) is type(choice) and value == choice for choice in arguments):
            return value
    elif origin in (list, tuple):
        return _convert_items(value, origin, arguments)
    elif origin is dict:
        if isinstance(value, Mapping):
            key_type, item_type = arguments
            return {_convert(k, key_type): _convert(item, item_type) for k, item in value.items()}
    elif type(value) is origin:
        return value
    raise ValueError


def _convert_float(value: Plain) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError
    try:
        number = float(value)
    except OverflowError:
        raise ValueError from None
    if not math.isfinite(number):
        raise ValueError
    return number


def _convert_items(value: Plain, kind: type, arguments: tuple[Any, ...]) -> Plain:
    if not isinstance(value, list | tuple):
        raise ValueError
    if kind is tuple and arguments[-1] is not Ellipsis:
        return tuple(_convert(item, each) for item, each in zip(value, arguments, strict=True))
    return kind(_convert(item, arguments[0]) for item in value)


_OTHER_WORDS = {
    "attention": "attn_implementation",
    "logprobs": "return_logprobs",
    "max_num_batched_tokens": "max_batch_tokens",
    "max_num_seqs": "max_requests_per_batch",
    "torch_dtype": "dtype",
}
"""Names that other programs have for settings of the engine."""


def nearest_name(name: str, known: Collection[str]) -> str | None:
    """Return the known name that `name` was most likely meant to be, or None."""
    other = _OTHER_WORDS.get(name)
    if other in known:
        return other
    matches = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=0.6)
    return matches[0] if matches else None
