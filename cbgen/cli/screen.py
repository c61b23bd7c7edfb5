"""The one place that writes to stderr: plain lines for people, with colour on a terminal.

Owns the console and what `--quiet` means. Whatever text comes in, a line stays one line of
printable characters. Knows nothing of jobs.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO, cast

from rich.console import Console
from rich.text import Text

from cbgen.cli.streams import PatientStream


class Screen:
    """Lines on stderr.

    Attributes:
        quiet: errors alone are written.
        console: for whoever draws more than lines; nobody makes another one.
    """

    def __init__(self) -> None:
        stream = PatientStream(sys.stderr)
        self.quiet = False
        self.console = Console(
            file=cast(TextIO, stream),
            force_terminal=stream.isatty(),  # else FORCE_COLOR puts escape codes into a log
            highlight=False,
            markup=False,
            emoji=False,
        )

    @property
    def can_redraw(self) -> bool:
        """Whether this is a terminal that can draw over itself."""
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def line(self, text: str | Text = "", style: str = "") -> None:
        """Write one line, unless quiet; it is never wrapped here."""
        if not self.quiet:
            self._write(text, style)

    def error(self, message: str) -> None:
        """Write `error: message`, quiet or not."""
        text = Text("error: ", style="bold red")
        text.append(one_line(message), style="not bold red")
        self._write(text, "")

    def raw(self, text: str) -> None:
        """Write lines as they are, quiet or not: a traceback."""
        for line in text.splitlines():
            self._write(line, "")

    def _write(self, text: str | Text, style: str) -> None:
        if isinstance(text, str):
            text = Text(printable(text), style=style)
        self.console.print(text, soft_wrap=True)


def one_line(text: str) -> str:
    """Return a text as one line of printable characters."""
    return printable(re.sub(r"\s*[\r\n]\s*", " ", text.strip()))


def printable(text: str) -> str:
    """Return a text with everything that may not be sent to a terminal escaped."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
