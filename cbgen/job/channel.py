"""A queue between two threads that can be bounded, closed, and told of a failure."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class ChannelClosed(Exception):
    """The other side has ended; what was put after that is lost on purpose."""


class Channel(Generic[T]):
    """Items in order, taken in groups: a reader takes all that is there without waiting for more.

    Args:
        capacity: items that may wait before `put` blocks; None = any number.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._failure: BaseException | None = None

    def put(self, item: T) -> None:
        """Append an item, waiting while the channel is full.

        Raises:
            ChannelClosed: the channel was closed.
        """
        self.put_all((item,))

    def put_all(self, items: Iterable[T]) -> None:
        """Append items at once, waiting while the channel is full; they may exceed the capacity.

        Raises:
            ChannelClosed: the channel was closed.
        """
        with self._changed:
            while self._capacity is not None and len(self._items) >= self._capacity:
                if self._is_closed:
                    break
                self._changed.wait()
            if self._is_closed:
                raise ChannelClosed
            self._items.extend(items)
            self._changed.notify_all()

    def take(self, most: int | None = None, timeout: float | None = None) -> list[T]:
        """Take what is there, up to `most` items, waiting for the first.

        Returns an empty list when the channel is closed and empty, and after `timeout` seconds.

        Raises:
            BaseException: the failure that `fail` gave, once the items before it are taken.
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

    def close(self) -> None:
        """End the channel: nothing more can be put, what is there can still be taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        """Close the channel and raise `failure` in whoever takes from it; the first one counts."""
        with self._changed:
            self._failure = self._failure or failure
            self._is_closed = True
            self._changed.notify_all()
