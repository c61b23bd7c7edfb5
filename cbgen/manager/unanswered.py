"""Requests that were taken and have not ended, and the names of those that ended last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cbgen.manager.outputs import Progress

_NUM_REMEMBERED = 10_000


class UnansweredRequests:
    """Requests by id, which of them were cancelled, and which are samples of one request.

    The ids of the last that were answered are remembered too, all that there ever were would take
    memory without end.

    Not thread-safe: the router's lock guards it.
    """

    def __init__(self) -> None:
        self._requests: dict[str, Progress] = {}
        self._cancelled: set[str] = set()
        self._answered: dict[str, None] = {}
        # Both hold only requests with several samples:
        self._samples: dict[str, set[str]] = {}  # unanswered ones, by the id of the first
        self._first_samples: dict[str, str] = {}  # the other way round

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def get(self, request_id: str) -> Progress | None:
        """Return the request of that id, None if there is none."""
        return self._requests.get(request_id)

    def add(self, samples: Sequence[Progress]) -> bool:
        """Take a request and its further samples; False, and none is taken, if an id is taken."""
        ids = [sample.request.request_id for sample in samples]
        if ids[0] in self._samples:  # the first of them has ended, others have not
            return False
        if any(request_id in self._requests for request_id in ids):
            return False
        self._requests.update(zip(ids, samples, strict=True))
        for request_id in ids:
            self._answered.pop(request_id, None)
        if len(ids) > 1:
            self._samples[ids[0]] = set(ids)
            self._first_samples.update(dict.fromkeys(ids, ids[0]))
        return True

    def remove(self, request_id: str) -> None:
        """Forget a request, if it is known."""
        self._requests.pop(request_id, None)
        self._cancelled.discard(request_id)
        first = self._first_samples.pop(request_id, None)
        if first is not None:
            self._samples[first].discard(request_id)
            if not self._samples[first]:
                del self._samples[first]

    def answer(self, request_id: str) -> None:
        """Forget a request but for its id."""
        self.remove(request_id)
        self._answered[request_id] = None
        if len(self._answered) > _NUM_REMEMBERED:
            del self._answered[next(iter(self._answered))]

    def was_answered(self, request_id: str) -> bool:
        """Whether a request of that id was answered of late and no other one has come since."""
        return request_id in self._answered

    def cancel(self, request_id: str) -> list[str]:
        """Note that a request is cancelled; return those of its samples that are here."""
        samples = {request_id, *self._samples.get(request_id, ())}
        found = [sample for sample in samples if sample in self._requests]
        self._cancelled.update(found)
        return found

    def is_cancelled(self, request_id: str) -> bool:
        """Whether a request that is here was cancelled."""
        return request_id in self._cancelled
