"""Values to JSON: one line a row, always valid, whatever the row holds.

Integers of any size and floats that a double cannot hold keep their exact text; NaN and infinities
become null; lone surrogates become U+FFFD. Knows nothing of what a row means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from cbgen.io.exact import ExactFloat

_SMALLEST_INTEGER = -(2**63)
_LARGEST_INTEGER = 2**64 - 1


def encode_row(row: Mapping[str, Any]) -> bytes:
    r"""Return the row as one line of UTF-8 JSON that ends with `\n`.

    Raises:
        TypeError: a value has no JSON form (nothing that was read from JSON is such a value).
    """
    return _encode(row, orjson.OPT_APPEND_NEWLINE)


def encode_value(value: object) -> str:
    """Return a value as compact JSON text, under the rules of `encode_row`."""
    return _encode(value, 0).decode("utf-8")


def _encode(value: object, option: int) -> bytes:
    try:
        return orjson.dumps(value, default=_encode_exact_float, option=option)
    except TypeError:  # a big integer, a lone surrogate, a key that is no string
        return orjson.dumps(_make_encodable(value), default=_encode_exact_float, option=option)


def _encode_exact_float(value: object) -> orjson.Fragment:
    if isinstance(value, ExactFloat):
        return orjson.Fragment(value.text)
    raise TypeError(f"a value of type {type(value).__name__} has no JSON form: {value!r}")


def _make_encodable(value: object) -> object:
    """Copy a value with everything that orjson refuses replaced."""
    if isinstance(value, str):
        return _replace_lone_surrogates(value)
    if isinstance(value, int) and not _SMALLEST_INTEGER <= value <= _LARGEST_INTEGER:
        return orjson.Fragment(str(value))
    if isinstance(value, Mapping):
        return {_key_text(key): _make_encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_make_encodable(item) for item in value]
    return value


def _key_text(key: object) -> str:
    return _replace_lone_surrogates(key) if isinstance(key, str) else encode_value(key)


def _replace_lone_surrogates(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
