"""Small files about a run, written beside its rows: facts for programs, replaced as a whole.

A reader sees the last whole content, never half of one. Knows nothing of what is in them.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from cbgen.errors import OutputError, UsageError


def writable_path(path: str, option: str) -> str:
    """Return where a side file really lies; the file is made if it does not exist.

    Links are followed, so that replacing the file leaves them alone.

    Args:
        path: as the user gave it.
        option: the option's name, for the error.

    Raises:
        UsageError: no regular file can be written there.
    """
    real = os.path.realpath(path)
    if os.path.exists(real) and not os.path.isfile(real):
        raise UsageError(f"{option} {path}: is no regular file; give the name of one")
    try:
        with open(real, "ab"):
            pass
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be written: {error.strerror}") from error
    return real


class AtomicFile:
    """A file whose content is replaced as a whole.

    Args:
        path: as the user gave it.
        option: the option's name, for the error.

    Raises:
        UsageError: it cannot be written.
    """

    def __init__(self, path: str, option: str) -> None:
        self._path = writable_path(path, option)
        self._new_path = f"{self._path}.{os.getpid()}.new"

    def replace(self, content: bytes) -> None:
        """Replace the content.

        Raises:
            OutputError: it cannot be written now; the last content is still there.
        """
        try:
            Path(self._new_path).write_bytes(content)
            os.replace(self._new_path, self._path)
        except OSError as error:
            raise OutputError(
                f"{self._path}: cannot be written: {error.strerror or error}"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                os.unlink(self._new_path)  # where it has not replaced the other
