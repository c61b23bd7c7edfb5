"""What people see: lines on stderr, with colour on a terminal, and how numbers are worded.

The one place that writes to stderr. Owns what `--quiet` means, and what happens to the standard
streams where they are closed or nobody reads them. Text from outside becomes printable characters
before it is shown, so a line stays one line. Knows nothing of jobs.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import TextIO, cast

import rich.console
from rich.text import Text


class Console:
    """Lines on stderr.

    Attributes:
        quiet: only errors are written.
        rich: rich's console, for code that draws more than lines; there is no other one.
    """

    def __init__(self) -> None:
        stream = _PatientStream(sys.stderr)
        self.quiet = False
        self.rich = rich.console.Console(
            file=cast(TextIO, stream),
            force_terminal=stream.isatty(),  # else FORCE_COLOR puts escape codes into a log
            highlight=False,
            markup=False,
            emoji=False,
        )

    @property
    def can_redraw(self) -> bool:
        """Whether this is a terminal that can draw over itself."""
        return self.rich.is_terminal and not self.rich.is_dumb_terminal

    def line(self, text: str = "", style: str = "") -> None:
        """Write one line, unless quiet; it is never wrapped here."""
        if not self.quiet:
            self._write(Text(_printable(text), style=style))

    def error(self, message: str) -> None:
        """Write `error: message`, quiet or not."""
        text = Text("error: ", style="bold red")
        self._write(text.append(one_line(message), style="not bold red"))

    def raw(self, text: str) -> None:
        """Write several lines, such as a traceback, quiet or not."""
        for line in text.splitlines():
            self._write(Text(_printable(line)))

    def _write(self, text: Text) -> None:
        self.rich.print(text, soft_wrap=True)


def one_line(text: str) -> str:
    """Return a text as one line of printable characters."""
    return _printable(re.sub(r"\s*[\r\n]\s*", " ", text.strip()))


def _printable(text: str) -> str:
    """Return a text with every character escaped that must not reach a terminal."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def fill_closed_descriptors() -> None:
    """Open /dev/null where a standard stream is closed, so that no file gets its number.

    Stdin is opened for writing and stdout for reading: who reads or writes rows there gets an error
    instead of an empty input or rows that nobody sees.
    """
    for descriptor, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)  # the lowest free number, which is this one
    # Python has None for streams that were closed when it started.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def discard(descriptor: int) -> None:
    """Send to /dev/null what is still written to a descriptor, such as Python's flush at exit."""
    with contextlib.suppress(OSError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, descriptor)
        os.close(devnull)


class _PatientStream:
    """The methods of a text stream that rich needs; what nobody can read is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            discard(self.fileno())
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            discard(self.fileno())


def count(number: float, noun: str = "") -> str:
    """Return `1,234 rows`; `1 row` for one."""
    if not noun:
        return f"{number:,.0f}"
    return f"{number:,.0f} {noun.removesuffix('s') if number == 1 else noun}"


def rate(number: float) -> str:
    """Return a number per second: whole where it is large."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def percent(share: float) -> str:
    """Return a share of 1 as `37%`."""
    return f"{share:.0%}"


def memory_size(num_bytes: float) -> str:
    """Return `12.40 GiB`, or MiB below one GiB."""
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
