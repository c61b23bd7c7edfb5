"""Input that nobody meant to give: odd values, and texts and files with damage. Seeded by tests."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

ODD_TEXTS = (
    "", " ", "\0", "\n", "\r\n", "\t", "\u2028", "\u2029", "\x85", "\ufeff", "\ufffd", "\x1b[31m",
    "\ud83d", "\udc00", "\U0001f600", "e\u0301", "null", "NaN", "-1", "1e400", "{", "}", "{{", "{%",
    "{{ x", "{question}", "%s", "../..", "/", "/dev/null", "-", "</s>", "<s>", "<|user|>",
    "x" * 5000, "\u00e4" * 300,
)  # fmt: skip
ODD_NUMBERS = (
    0, 1, -1, 2, 3, 255, 256, 259, 260, 10**6, 2**31, 2**31 - 1, 2**32, 2**53 + 1, 2**63, 2**63 - 1,
    -(2**63), -(2**63) - 1, 2**64, 2**64 - 1, 10**30, 10**400, -(10**400), 0.0, -0.0, 0.5, 1e-320,
    1e308, -1e308, math.inf, -math.inf, math.nan, 0.1, 1.5,
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, *ODD_TEXTS, *ODD_NUMBERS, [], {}, [[]], [None], [{}], {"": None}, {"a": {}},
    [1, 2, 3], [-1], [10**30], ["a", 1, None], ["a", "b"], [math.nan], list(range(300)),
)  # fmt: skip

_BYTES = (
    b"\0",
    b"\xff",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\n",
    b'"',
    b"\\",
    b"{",
    b"]",
    b"\\ud800",
    b",",
)


def nested(value: Any, depth: int) -> Any:
    """Return a value inside of this many lists and mappings."""
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def odd_value(chance: random.Random) -> Any:
    """Return one of the values, or one that is nested deeply."""
    value = chance.choice(ODD_VALUES)
    return nested(value, chance.choice((1, 3, 60, 190, 210))) if chance.random() < 0.1 else value


def damaged(chance: random.Random, data: bytes, parts: Sequence[bytes] = _BYTES) -> bytes:
    """Return bytes of which some are changed, gone, doubled, or have others between them."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        start = chance.randrange(len(changed) + 1)
        end = min(len(changed), start + chance.choice((1, 1, 4, 30)))
        kind = chance.randrange(6)
        if kind == 0:
            changed[start:end] = chance.randbytes(end - start)
        elif kind == 1:
            del changed[start:end]
        elif kind == 2:
            changed[start:start] = chance.choice(parts)
        elif kind == 3:
            changed[start:end] = changed[start:end] * 2
        elif kind == 4 and start < len(changed):
            changed[start] ^= 1 << chance.randrange(8)
        elif chance.random() < 0.3:
            del changed[start:]
    return bytes(changed)


def with_odd_value(chance: random.Random, value: Any) -> Any:
    """Return a copy of nested values in which one, at any depth, is odd, renamed or missing."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice(list(value))
        changed = dict(value)
        kind = chance.random()
        if kind < 0.08:
            del changed[key]
        elif kind < 0.16:
            changed[f"{key}{chance.choice(ODD_TEXTS)}"] = changed.pop(key)
        elif kind < 0.2:
            changed[str(chance.choice(ODD_VALUES))] = odd_value(chance)
        else:
            changed[key] = with_odd_value(chance, value[key])
        return changed
    if isinstance(value, list) and value and chance.random() < 0.8:
        items = list(value)
        place = chance.randrange(len(items))
        items[place] = with_odd_value(chance, items[place])
        return items * (chance.choice((1, 1, 1, 2, 100)) if len(str(items)) < 500 else 1)
    return odd_value(chance)
