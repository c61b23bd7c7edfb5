"""Times as people and batch systems write them, in seconds."""

from __future__ import annotations

import re

from cbgen.errors import UsageError

_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def parse_duration(text: str, option: str) -> float:
    """Return the seconds of `90`, `90s`, `15m`, `3h50m`, `2d`, or of Slurm's `1-02:03:04`.

    A number alone is seconds, `mm:ss` and `hh:mm:ss` are as on a clock, and after days come hours.

    Args:
        text: the duration.
        option: the option's name, for the error.

    Raises:
        UsageError: it is none of these, or is zero.
    """
    text = text.strip()
    seconds = 0
    if units := _UNITS.fullmatch(text):
        seconds = _seconds([int(part or 0) for part in units.groups()])
    elif clock := _CLOCK.fullmatch(text):
        days, *parts = clock.groups()
        given = [int(part) for part in parts if part is not None]
        # After days the first number is hours; without them the last one is seconds.
        aligned = [*given, 0, 0][:3] if days else [0, 0, *given][-3:]
        seconds = _seconds([int(days or 0), *aligned])
    if seconds <= 0:
        raise UsageError(
            f"{option} is {text!r}; expected a time such as 90s, 15m, 3h50m or 1-02:03:04"
        )
    return float(seconds)


def _seconds(parts: list[int]) -> int:
    days, hours, minutes, seconds = parts
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
