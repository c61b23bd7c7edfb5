"""Mailboxes of those who follow a request: a queue for threads, a callback for asyncio."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from cbgen.manager.mail import Closed, Mail, MailboxGone
from cbgen.manager.outputs import RequestOutput


class CallbackMailbox:
    """Calls a function on the event loop that it was made in, with every output.

    A request that failed with the engine comes as an output too.
    """

    def __init__(self, callback: Callable[[RequestOutput], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._callback = callback

    def put(self, item: Mail) -> None:
        """Hand an output to the event loop."""
        output = item.output if isinstance(item, Closed) else item
        if output is not None:
            _call(self._loop, self._callback, output)


class AsyncMailbox:
    """Items for one reader on the event loop that it was made in."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[Mail] = deque()
        self._has_items = asyncio.Event()

    def put(self, item: Mail) -> None:
        """Append an item and wake the reader."""
        self._items.append(item)
        try:
            _call(self._loop, self._has_items.set)
        except MailboxGone:
            self._items.remove(item)
            raise

    async def get(self) -> Mail:
        """Take the next item, waiting for it."""
        while not self._items:
            self._has_items.clear()
            if not self._items:  # one may have come between the look and the clearing
                await self._has_items.wait()
        return self._items.popleft()

    def unread(self) -> list[RequestOutput]:
        """Return the outputs that nobody has taken."""
        return [item for item in self._items if isinstance(item, RequestOutput)]


def _call(
    loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object
) -> None:
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError as error:  # the loop is closed
        raise MailboxGone from error
