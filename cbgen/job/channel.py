"""How the threads of a job hand items over: a queue, and a count of what is in flight."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class Channel(Generic[T]):
    """A queue between two threads that can be bounded, closed, and told of a failure.

    Items keep their order and are taken in groups: a reader gets all that is there and does not
    wait for more. What is put once the channel is closed is dropped. A channel of outputs can be
    the sink of an engine.

    Args:
        capacity: items that may wait before `put` blocks; None = any number.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._failure: BaseException | None = None

    def put(self, items: Iterable[T]) -> bool:
        """Append items at once, waiting while the channel is full; they may exceed the capacity.

        Returns:
            Whether they are taken; False once the channel is closed.
        """
        with self._changed:
            while self._capacity is not None and len(self._items) >= self._capacity:
                if self._is_closed:
                    return False
                self._changed.wait()
            if self._is_closed:
                return False
            self._items.extend(items)
            self._changed.notify_all()
            return True

    def take(self, most: int | None = None, timeout: float | None = None) -> list[T]:
        """Take what is there, up to `most` items, waiting for the first.

        Returns an empty list when the channel is closed and empty, and after `timeout` seconds.

        Raises:
            BaseException: the failure that `close` was given, once the items before it are taken.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._is_closed, timeout)
            if not self._items and self._failure is not None:
                raise self._failure
            taken = list(islice(self._items, most))
            for _ in taken:
                self._items.popleft()
            self._changed.notify_all()
            return taken

    def close(self, failure: BaseException | None = None) -> None:
        """Drop what is put from now on; what is there can still be taken.

        Args:
            failure: is raised in whoever takes from the channel then; the first one counts.
        """
        with self._changed:
            self._failure = self._failure or failure
            self._is_closed = True
            self._changed.notify_all()


class Slots:
    """A count of free places, which bounds how much is in flight.

    `acquire` and `release` may be called by different threads.
    """

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
        """Take places without waiting, even if none is free; the next `acquire` waits longer."""
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
