"""The queue of requests that wait for admission."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from cbgen.engine.request import Request


class WaitingQueue:
    """Requests in order of arrival, preempted ones before all others."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[str]:
        """Yield the ids in order."""
        return iter(self._requests)

    def first(self, count: int) -> list[Request]:
        """Return up to `count` requests from the front; they stay in the queue."""
        return list(islice(self._requests.values(), count))

    def append(self, request: Request) -> None:
        """Put a new request at the end."""
        self._requests[request.request_id] = request

    def put_first(self, request: Request) -> None:
        """Put a preempted request at the front."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        del self._requests[request.request_id]
