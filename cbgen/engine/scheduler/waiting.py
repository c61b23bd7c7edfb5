"""Requests that have not ended: all of them by id, and in order those that wait."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import Generic, TypeVar

from cbgen.engine.cache.prefix import AwaitedPrefix
from cbgen.engine.request import Request

R = TypeVar("R", bound=Request)


class UnfinishedRequests(Generic[R]):
    """Requests that wait or run, in order of arrival, and which are samples of one prompt.

    Samples name another request as their parent. They are cancelled with it, also when it has ended
    before them.
    """

    def __init__(self) -> None:
        self._requests: dict[str, R] = {}
        self._samples: dict[str, dict[str, R]] = {}  # by the id of their parent

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[R]:
        return iter(self._requests.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def get(self, request_id: str) -> R | None:
        """Return a request, None if it is not here."""
        return self._requests.get(request_id)

    def add(self, request: R) -> None:
        """Take a request."""
        self._requests[request.request_id] = request
        if request.parent_id is not None:
            self._samples.setdefault(request.parent_id, {})[request.request_id] = request

    def remove(self, request: R) -> None:
        """Forget a request that has ended."""
        del self._requests[request.request_id]
        if request.parent_id is not None:
            samples = self._samples[request.parent_id]
            del samples[request.request_id]
            if not samples:
                del self._samples[request.parent_id]

    def with_samples(self, request_id: str) -> list[R]:
        """Return a request and those that name it as their parent, as far as they are here."""
        found = list(self._samples.get(request_id, {}).values())
        request = self._requests.get(request_id)
        return found if request is None else [request, *found]

    def check(self, request_ids: Iterable[str]) -> None:
        """Compare with the ids of the requests that wait and of those that are admitted.

        Raises:
            AssertionError: a request is in neither group, or in both.
        """
        if sorted(request_ids) != sorted(self._requests):
            raise AssertionError("a request is neither waiting nor admitted, or both")


class WaitingQueue:
    """Requests that are not admitted, in the order in which they may be.

    Preempted ones come first, the last of them before all, then the others in order of arrival. A
    request that waits for what another one computes is held apart until that is stored, so that
    nobody looks at it meanwhile; then it stands where it stood before.
    """

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0
        self._num_preempted = 0
        # Those that were removed stay in these heaps until it is their turn.
        self._ready: list[tuple[int, Request]] = []  # by their number in the queue
        self._held: dict[tuple[Request, int], list[tuple[int, int, Request]]] = {}
        """By owner and its admission: tokens that it must have stored, number, request."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """Take a request behind all others."""
        self._num_arrived += 1
        self._put(request, self._num_arrived)

    def add_first(self, request: Request) -> None:
        """Take a request before all others."""
        self._num_preempted += 1
        self._put(request, -self._num_preempted)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended."""
        del self._requests[request.request_id]

    def first(self) -> Request | None:
        """Return the first request that is not held; None if there is none."""
        while self._ready:
            request = self._ready[0][1]
            if self._waits(request):
                return request
            heappop(self._ready)
        return None

    def pop(self) -> None:
        """Forget the first request, which is admitted."""
        _, request = heappop(self._ready)
        del self._requests[request.request_id]

    def hold(self, awaited: AwaitedPrefix) -> None:
        """Hold the first request until the owner of the prefix has stored it, or leaves."""
        number, request = heappop(self._ready)
        held = self._held.setdefault((awaited.owner, awaited.admission), [])
        heappush(held, (awaited.num_tokens, number, request))

    def wake(self, step: int) -> None:
        """Put those back whose prefix was stored before a step, or is not computed any more.

        It looks at owners, not at those that wait for them. Where a step has tokens left for this,
        every owner has had some.
        """
        for key in list(self._held):
            owner, admission = key
            is_admitted = owner.row >= 0 and owner.admission == admission
            stored = owner.settled_tokens(step) if is_admitted else sys.maxsize
            held = self._held[key]
            while held and held[0][0] <= stored:
                _, number, request = heappop(held)
                heappush(self._ready, (number, request))
            if not held:
                del self._held[key]

    def check(self) -> None:
        """Compare the queue and those held apart with all that wait.

        Raises:
            AssertionError: a request is lost, or stands at two places.
        """
        found = [request for _, request in self._ready if self._waits(request)]
        for held in self._held.values():
            found += [request for _, _, request in held if self._waits(request)]
        if sorted(request.request_id for request in found) != sorted(self._requests):
            raise AssertionError("a request that waits is lost, or stands twice in the queue")

    def _put(self, request: Request, number: int) -> None:
        self._requests[request.request_id] = request
        heappush(self._ready, (number, request))

    def _waits(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request
