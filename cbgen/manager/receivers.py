"""Where outputs arrive at a caller: a queue for threads, a queue or a callback for asyncio."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from cbgen.errors import EngineError
from cbgen.manager.outputs import RequestOutput
from cbgen.values import show_argument


@dataclass(frozen=True, slots=True)
class Closed:
    """End marker after the last output: nothing more will come.

    Attributes:
        failure: what ended the engine, None after a stop.
        output: for a follower, after a failure: its request as it failed.
    """

    failure: EngineError | None = None
    output: RequestOutput | None = None


Item = RequestOutput | Closed


class OutputQueue(SimpleQueue[Item]):
    """Outputs for one reader on a thread."""

    def unread(self) -> list[RequestOutput]:
        """Remove and return the outputs that nobody has taken."""
        items = [self.get() for _ in range(self.qsize())]
        return [item for item in items if isinstance(item, RequestOutput)]


class AsyncOutputQueue:
    """Outputs for one reader on the event loop that it was made in."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[Item] = deque()
        self._has_items = asyncio.Event()

    def put(self, item: Item) -> None:
        """Append an item and wake the reader.

        Raises:
            RuntimeError: the event loop is closed.
        """
        self._items.append(item)
        try:
            self._loop.call_soon_threadsafe(self._has_items.set)
        except RuntimeError:
            self._items.remove(item)
            raise

    async def get(self) -> Item:
        """Take the next item, waiting for it."""
        while not self._items:
            self._has_items.clear()
            if not self._items:  # one may have come between the look and the clearing
                await self._has_items.wait()
        return self._items.popleft()

    def unread(self) -> list[RequestOutput]:
        """Return the outputs that nobody has taken."""
        return [item for item in self._items if isinstance(item, RequestOutput)]


class OutputCallback:
    """Calls a function on the event loop that it was made in, with every output.

    A request that failed with the engine comes as an output too.

    Raises:
        TypeError: the callback is no function, or an `async` one.
        RuntimeError: no event loop runs in this thread.
    """

    def __init__(self, callback: Callable[[RequestOutput], object]) -> None:
        if not callable(callback):
            raise TypeError(f"the callback must be a function, got {show_argument(callback)}")
        if any(map(inspect.iscoroutinefunction, (callback, type(callback).__call__))):
            raise TypeError(
                "the callback must be a plain function, which is called on the event loop; give "
                "lambda output: asyncio.create_task(callback(output)), or use request_id_aiter"
            )
        self._loop = asyncio.get_running_loop()
        self._callback = callback

    def put(self, item: Item) -> None:
        """Hand an output to the event loop.

        Raises:
            RuntimeError: the event loop is closed.
        """
        output = item.output if isinstance(item, Closed) else item
        if output is not None:
            self._loop.call_soon_threadsafe(self._callback, output)


FollowerQueue = OutputQueue | AsyncOutputQueue
Receiver = FollowerQueue | OutputCallback
"""Takes what is sent to one caller; `put` is called on the engine's thread, so it never waits."""
