"""Numbers whose text must survive: what a double cannot hold is written as it was read."""

from __future__ import annotations


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
