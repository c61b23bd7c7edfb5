"""`prompt.template`: text with `{column}` places, compiled once and filled from each row.

Names only: no attribute access, indexing, conversions or format specifications, so that a template
reaches nothing but the row's columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cbgen.errors import RowError, UsageError
from cbgen.io.json_values import encode_value

_PIECE = re.compile(r"(?P<escape>\{\{|\}\})|\{(?P<name>[^{}]*)\}|(?P<brace>[{}])")
_COLUMN_NAME = re.compile(r"[^.\[\]!:\s](?:[^.\[\]!:]*[^.\[\]!:\s])?")


class Template:
    """A compiled template.

    Raises:
        UsageError: a lone brace, or a place that is more than a column's name.
    """

    def __init__(self, text: str) -> None:
        self._pieces: list[tuple[str, str | None]] = []
        """Literal text, and the column whose value follows it (None at the end)."""
        literal, start = "", 0
        for piece in _PIECE.finditer(text):
            literal += text[start : piece.start()]
            start = piece.end()
            if piece["escape"]:
                literal += piece["escape"][0]
                continue
            if piece["brace"]:
                raise UsageError(
                    f"prompt.template: lone {piece['brace']!r} at character {piece.start() + 1}; "
                    "write {{ and }} for literal braces",
                    key="prompt.template",
                )
            self._pieces.append((literal, _checked_name(piece["name"])))
            literal = ""
        self._pieces.append((literal + text[start:], None))

    @property
    def columns(self) -> list[str]:
        """Names of the columns that the template uses, in order of first use."""
        return list(dict.fromkeys(name for _, name in self._pieces if name is not None))

    def render(self, columns: Mapping[str, Any]) -> str:
        """Fill the places: strings as they are, other values as JSON.

        Raises:
            RowError: a column is missing, or null (NaN too, which JSON writes as null).
        """
        parts = []
        for literal, name in self._pieces:
            parts.append(literal)
            if name is not None:
                parts.append(_text_of(columns, name))
        return "".join(parts)


def compile_template(text: str | None) -> Template | None:
    """Return the compiled template; None if there is none.

    Raises:
        UsageError: the template is wrong.
    """
    return None if text is None else Template(text)


def _checked_name(name: str) -> str:
    if _COLUMN_NAME.fullmatch(name):
        return name
    if not name:
        problem = "names no column"
    else:
        problem = "is no plain column name (no '.', '[', '!' or ':', no spaces around it)"
    raise UsageError(
        f"prompt.template: {{{name}}} {problem}; write {{column}}, and {{{{ }}}} for literal "
        "braces",
        key="prompt.template",
    )


def _text_of(columns: Mapping[str, Any], name: str) -> str:
    try:
        value = columns[name]
    except KeyError:
        present = ", ".join(columns) or "none"
        raise RowError(
            "missing_column",
            f"prompt.template uses {name!r}, a column that the row lacks; it has: {present}",
        ) from None
    if isinstance(value, str):
        return value
    text = encode_value(value)
    if text == "null":
        raise RowError(
            "null_column", f"prompt.template uses the column {name!r}, which is null in this row"
        )
    return text
