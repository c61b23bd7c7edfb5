"""Plain lines of JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator

from cbgen.io.output.output_file import OutputFile


class JsonLines:
    """The format of a file that has none of the other suffixes."""

    name = "text"
    suffix = ""
    signatures = ()

    def check_package(self) -> None:
        """Do nothing: no package is needed."""

    def open_output(self, path: str, *, overwrite: bool) -> OutputFile:
        """Open an output; errors are those of `OutputFile.open`."""
        return OutputFile.open(path, overwrite=overwrite)

    def read_output(self, path: str, start: int = 0) -> Iterator[bytes | int]:
        """Yield what `read_lines` finds in an output, from an offset on."""
        return read_lines(path, start)


JSON_LINES = JsonLines()


def read_lines(path: str, start: int = 0) -> Iterator[bytes | int]:
    """Yield the whole lines of a file from an offset on, and behind each where it ends.

    A torn last line is left out; a file that does not exist has no lines.
    """
    if not os.path.exists(path):
        return
    with open(path, "rb") as stream:
        stream.seek(start)
        for line in stream:
            if line.endswith(b"\n"):
                start += len(line)
                yield line
                yield start
