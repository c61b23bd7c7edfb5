"""Numbers as people read them."""

from __future__ import annotations


def count(number: float, noun: str = "") -> str:
    """Return `1,234 rows`; `1 row` for one."""
    if not noun:
        return f"{number:,.0f}"
    return f"{number:,.0f} {noun.removesuffix('s') if number == 1 else noun}"


def rate(number: float) -> str:
    """Return a number a second: whole where it is large."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def percent(share: float) -> str:
    """Return a share of 1 as `37%`."""
    return f"{share:.0%}"


def memory_size(num_bytes: float) -> str:
    """Return `12.40 GiB`, or MiB where that says more."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:,.1f} MiB"
    return f"{num_bytes / 2**30:,.2f} GiB"


def seconds(number: float) -> str:
    """Return `12.3 s`, or `1:02:03` from a minute on."""
    return f"{number:.1f} s" if number < 60 else clock(number)


def clock(number: float) -> str:
    """Return `0:12`, `1:02:03`."""
    minutes, rest = divmod(int(number), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
