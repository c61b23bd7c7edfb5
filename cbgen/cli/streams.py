"""The process's standard streams where they are closed, or close during the run."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def fill_closed_descriptors() -> None:
    """Put /dev/null where a standard stream is closed, so that no file gets its number.

    Stdin and stdout are opened the wrong way round: who reads or writes rows there gets an error
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


class PatientStream:
    """What a console needs of a text stream; where nobody can read it, what is written is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def isatty(self) -> bool:
        """Whether this is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write, or lose the text."""
        try:
            return self._stream.write(text)
        except OSError:
            discard(self.fileno())
            return len(text)

    def flush(self) -> None:
        """Flush, or lose what is buffered."""
        try:
            self._stream.flush()
        except OSError:
            discard(self.fileno())
