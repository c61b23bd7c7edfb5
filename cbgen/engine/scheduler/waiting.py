"""Requests that have not ended, by id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

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
