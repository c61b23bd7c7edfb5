"""A file that is open only while it is read from, so that thousands can be read side by side."""

from __future__ import annotations

import io
import os
from typing import Any


class ReopenedFile(io.RawIOBase):
    """The bytes of a regular file, which must not change meanwhile."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset = 0

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def seekable(self) -> bool:
        """Say that it can be sought in."""
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401  any writable buffer
        """Fill the buffer as far as the file goes; 0 at its end."""
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            size = os.preadv(descriptor, [buffer], self._offset)
        finally:
            os.close(descriptor)
        self._offset += size
        return size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset."""
        starts = {
            os.SEEK_SET: 0,
            os.SEEK_CUR: self._offset,
            os.SEEK_END: os.path.getsize(self._path),
        }
        self._offset = starts[whence] + offset
        return self._offset
