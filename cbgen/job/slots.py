"""A count of free places, taken in groups."""

from __future__ import annotations

import threading


class Slots:
    """Bounds how much is under way. `acquire` and `release` may be called by different threads."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._is_closed = False
        self._changed = threading.Condition()

    def acquire(self, most: int) -> int:
        """Take up to `most` places, waiting for the first; 0 once the slots are closed."""
        with self._changed:
            while self._free <= 0 and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return 0
            taken = min(self._free, most)
            self._free -= taken
            return taken

    def take_more(self, count: int) -> None:
        """Take places without waiting, even if there are none.

        `acquire` then waits until as many are free again; so what is known too late to be waited
        for delays what comes after it.
        """
        with self._changed:
            self._free -= count

    def release(self, count: int = 1) -> None:
        """Give places back."""
        with self._changed:
            self._free += count
            self._changed.notify_all()

    def close(self) -> None:
        """Wake whoever waits, and give out no more places."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
