"""Callers who wait for one output each, of a request or of any."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from cbgen.manager.mail import Mail


class WouldWait(Exception):
    """Nothing is there, and the caller may not wait."""


@dataclass(slots=True, eq=False)
class Waiter:
    """One of them."""

    request_id: str | None
    """None = any."""
    ends_when_answered: bool
    mailbox: SimpleQueue[Mail] = field(default_factory=SimpleQueue)

    def arrived(self) -> Mail | None:
        """Return what is there already, None if nothing is."""
        try:
            return self.mailbox.get_nowait()
        except Empty:
            return None


class Waiters:
    """Those who wait, in the order in which they came.

    Not thread-safe: the router's lock guards it.
    """

    def __init__(self) -> None:
        self._waiters: dict[str | None, OrderedDict[int, Waiter]] = {}  # by request

    def __len__(self) -> int:
        return sum(map(len, self._waiters.values()))

    def add(self, waiter: Waiter) -> None:
        """Let somebody wait."""
        self._waiters.setdefault(waiter.request_id, OrderedDict())[id(waiter)] = waiter

    def remove(self, waiter: Waiter) -> None:
        """Let somebody go who may still wait."""
        waiters = self._waiters.get(waiter.request_id)
        if waiters is not None:
            waiters.pop(id(waiter), None)
            if not waiters:
                del self._waiters[waiter.request_id]

    def serve(self, request_id: str | None, item: Mail) -> bool:
        """Hand something to the first who waits for a request, or for any; False if nobody does."""
        for waiter in self._waiters.get(request_id, {}).values():
            self._end(waiter, item)
            return True
        return False

    def end_all(self, item: Mail) -> None:
        """Hand the same to everybody and let them go."""
        for waiters in list(self._waiters.values()):
            for waiter in list(waiters.values()):
                self._end(waiter, item)

    def end_answered(self, item: Mail) -> None:
        """Hand the same to all who wait no longer than there are unanswered requests."""
        for waiter in list(self._waiters.get(None, {}).values()):
            if waiter.ends_when_answered:
                self._end(waiter, item)

    def _end(self, waiter: Waiter, item: Mail) -> None:
        self.remove(waiter)
        waiter.mailbox.put(item)
