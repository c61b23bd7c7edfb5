"""The files that one command uses, told apart by what they are and not by their names.

Symbolic links, hard links and redirections are seen. Knows nothing of what is in a file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Hashable

from cbgen.errors import UsageError

_STDIN, _STDOUT = 0, 1


class UsedFiles:
    """What the files of a command are used for, so that none is written over another.

    Pipes, terminals and other devices may be used any number of times.
    """

    def __init__(self) -> None:
        self._uses: dict[Hashable, str] = {}

    def note_read(self, path: str, use: str) -> None:
        """Note a file that is read.

        Args:
            path: the file, `-` for stdin; it may be missing, whoever opens it says so.
            use: such as "the input file in.jsonl", for the error.
        """
        file = identity(path, _STDIN)
        if file is not None:
            self._uses.setdefault(file, use)

    def note_folder_read(self, path: str, use: str) -> None:
        """Note every file in a folder and in those below it."""
        for folder, _, names in os.walk(path):
            for name in names:
                self.note_read(os.path.join(folder, name), use)

    def note_written(self, path: str, use: str, *, given_as: str) -> None:
        """Note a file that is written.

        Args:
            path: the file, `-` for stdout; it may be missing.
            use: such as "the output", for the error.
            given_as: what the user wrote, for the error.

        Raises:
            UsageError: it is used already.
        """
        file = identity(path, _STDOUT)
        if file is None:
            return
        if file in self._uses:
            raise UsageError(f"{given_as}: {use} is already {self._uses[file]}; name another file")
        self._uses[file] = use


def identity(path: str, descriptor: int) -> Hashable | None:
    """Return what all names of a regular file have in common; None if it is a device or a folder.

    A file that is missing is known by its folder and its name.

    Args:
        path: the file; `-` for the open `descriptor`.
        descriptor: of stdin or stdout.
    """
    try:
        status = os.fstat(descriptor) if path == "-" else os.stat(path)
    except ValueError:  # no file can have this name
        return path
    except OSError:
        try:
            folder, name = os.path.split(os.path.realpath(path))
            status = os.stat(folder)
        except OSError:
            return path
        return status.st_dev, status.st_ino, name
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def real_output(path: str) -> str:
    """Return the file that an output's name leads to; what lies beside it then has one place."""
    if path == "/dev/stdout" or not os.path.islink(path):
        return path
    real = os.path.realpath(path)
    # Links of /proc lead to what has no name.
    is_same = os.path.isfile(path) and os.path.exists(real) and os.path.samefile(path, real)
    return real if is_same or not os.path.exists(path) else path
