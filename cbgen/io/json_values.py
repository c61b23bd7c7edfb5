"""Rows and lines of JSON, exactly: what is read is written back with the same text.

The fast parser reads nearly every line. Lines with a long run of digits (an integer may exceed 64
bits) and lines that it refuses go through the exact parser, which also knows NaN. A line that is
read always gives a row or a RowError; a row that is written is always valid JSON: integers of any
size and floats that a double cannot hold keep their text, NaN and infinities become null, lone
surrogates U+FFFD. Knows nothing of what a row means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import orjson

from cbgen.errors import RowError


class ExactFloat(float):
    """A float that is written back with the text it was read from, such as `1e400`.

    In arithmetic and comparisons it is the nearest double, which may be infinite.
    """

    __slots__ = ("text",)

    text: str

    def __new__(cls, text: str) -> ExactFloat:
        """Read the JSON number `text`."""
        number = super().__new__(cls, text)
        number.text = text
        return number


def read_float(text: str) -> float:
    """Return the float of a JSON number, keeping the text where Python would write another one."""
    number = float(text)
    return number if repr(number) == text else ExactFloat(text)


MAX_DEPTH = 200
"""Deepest nesting of a row; what is deeper could be read but not written again."""

_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * 19  # the shortest integer outside 64 bits has 19 digits
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]|[^\s"\[\]{},:]+')
_EXACT = json.JSONDecoder(parse_float=read_float)
_LINE_ENDS = [(end.encode(), b"\\u%04x" % ord(end)) for end in "\u0085\u2028\u2029"]
_JSON_KINDS = {str: "a string", list: "an array", bool: "a boolean", type(None): "null"}
_SMALLEST_INTEGER = -(2**63)
_LARGEST_INTEGER = 2**64 - 1


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


def shallow_columns(line: bytes) -> dict[str, Any]:
    """Return the columns of a row that is nested too deeply: scalars, and None for each container.

    Reads no further than the end of what is an object so far.
    """
    columns: dict[str, Any] = {}
    depth = 0
    key: str | None = None
    for token in _TOKENS.findall(line):
        if token in b"[{":
            if depth == 1 and key is not None:
                columns[key], key = None, None
            depth += 1
        elif token in b"]}":
            depth -= 1
        elif depth == 1:
            try:
                scalar = _EXACT.decode(token.decode("utf-8"))
            except ValueError:  # the line is no JSON behind this
                break
            if key is None:
                key = str(scalar)
            else:
                columns[key], key = scalar, None
    return columns


def _exceeds_depth(value: object) -> bool:
    """Whether a value has more than MAX_DEPTH levels of containers."""
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    depth = 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, dict | list)
        ]
    return depth > MAX_DEPTH


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


def encode_row(row: Mapping[str, Any]) -> bytes:
    r"""Return the row as one line of UTF-8 JSON that ends with `\n`.

    Other line ends of Unicode are escaped: readers that split text into lines as Python does would
    cut the row there.

    Raises:
        TypeError: a value has no JSON form (nothing that was read from JSON is such a value).
    """
    line = _encode(row, orjson.OPT_APPEND_NEWLINE)
    for character, escape in _LINE_ENDS:
        if character in line:
            line = line.replace(character, escape)
    return line


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
