"""One line of bytes to the values of one row, exactly.

The fast parser reads nearly every line. Lines with a long run of digits (an integer may exceed 64
bits) and lines that it refuses go through the exact one, which also knows NaN. Raises RowError for
everything else; no bytes make it raise anything other than that.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from cbgen.errors import RowError
from cbgen.io.exact import read_float

MAX_DEPTH = 200
"""Deepest nesting of a row; what is deeper could be read but not written again."""

_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * 19  # the shortest integer outside 64 bits has 19 digits
_EXACT = json.JSONDecoder(parse_float=read_float)
_JSON_KINDS = {str: "a string", list: "an array", bool: "a boolean", type(None): "null"}


def decode_row(line: bytes) -> dict[str, Any]:
    """Parse one JSON object. Of a key that occurs twice the last value counts.

    Raises:
        RowError: the bytes are not UTF-8, not JSON, no object, nested deeper than MAX_DEPTH, or
            hold a lone surrogate.
    """
    if _LONG_NUMBER in line.translate(_DIGITS_TO_ZERO):
        value = _decode_exactly(line)
    else:
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError:
            value = _decode_exactly(line)
    if not isinstance(value, dict):
        kind = _JSON_KINDS.get(type(value), "a number")
        raise RowError("not_an_object", f"the line is {kind}; a row is a JSON object, {{...}}")
    may_be_deep = line.count(b"[") + line.count(b"{") > MAX_DEPTH
    if may_be_deep and _exceeds_depth(value):
        raise _too_deep()
    return value


def _decode_exactly(line: bytes) -> object:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(
            "invalid_utf8",
            f"byte 0x{line[error.start]:02x} at offset {error.start} of the line is not UTF-8 "
            f"({error.reason}); save the file as UTF-8",
        ) from None
    try:
        value: object = _EXACT.decode(text)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 10) : error.pos + 20].strip()
        raise RowError(
            "invalid_json", f"not JSON: {error.msg} at column {error.colno}, near {near!r}"
        ) from None
    except ValueError as error:  # Python limits the digits of one integer
        raise RowError(
            "invalid_json", f"an integer is too long: {error}; write it as a string"
        ) from None
    if "\\u" in text and isinstance(value, dict) and not _exceeds_depth(value):
        _refuse_lone_surrogates(value)
    return value


def _too_deep() -> RowError:
    return RowError("nested_too_deeply", f"the row is nested deeper than {MAX_DEPTH} levels")


def _exceeds_depth(value: object) -> bool:
    """Whether a value has more than MAX_DEPTH levels of containers."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else _items(container))
            if isinstance(item, dict | list)
        ]
    return depth > MAX_DEPTH


def _items(container: object) -> list[Any]:
    return container if isinstance(container, list) else []


def _refuse_lone_surrogates(columns: dict[str, Any]) -> None:
    for name, value in columns.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError(
                "lone_surrogate",
                f"column {name!r} holds half of a surrogate pair "
                f"(\\u{ord(error.object[error.start]):04x}), which is no character; "
                "write the whole pair or U+FFFD",
            ) from None
