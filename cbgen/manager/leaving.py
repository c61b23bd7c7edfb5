"""A lock that the garbage collector cannot stop.

An abandoned stream is closed by the garbage collector, which runs on any thread at any moment, also
while that thread holds the lock. So closing never waits: who leaves is noted, and settled by
whoever holds the lock next.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class LeavingLock(Generic[T]):
    """A context manager, not reentrant.

    Args:
        settle: does what a leaver wants; called with the lock held.
    """

    def __init__(self, settle: Callable[[T], None]) -> None:
        self._settle = settle
        self._lock = threading.Lock()
        self._leavers: deque[T] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._settle_all()

    def __exit__(self, *_exception: object) -> None:
        self._lock.release()
        self._settle_soon()

    def leave(self, leaver: T) -> None:
        """Settle a leaver now if nobody holds the lock, else as soon as it is free."""
        self._leavers.append(leaver)
        self._settle_soon()

    def _settle_soon(self) -> None:
        while self._leavers and self._lock.acquire(blocking=False):
            try:
                self._settle_all()
            finally:
                self._lock.release()

    def _settle_all(self) -> None:
        while self._leavers:
            self._settle(self._leavers.popleft())
