"""Outputs that nobody has fetched yet."""

from __future__ import annotations

from collections import OrderedDict, deque

from cbgen.manager.outputs import RequestOutput


class KeptOutputs:
    """Outputs in the order in which they came, also found by the id of their request.

    Not thread-safe: the router's lock guards it.
    """

    def __init__(self) -> None:
        self._outputs: OrderedDict[int, RequestOutput] = OrderedDict()  # by number
        self._numbers: dict[str, deque[int]] = {}  # by request id, oldest first
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._outputs)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._numbers

    def add(self, output: RequestOutput, *, has_id: bool) -> None:
        """Keep an output; without `has_id` it is not found by its request's id."""
        self._num_added += 1
        self._outputs[self._num_added] = output
        if has_id:
            self._numbers.setdefault(output.request_id, deque()).append(self._num_added)

    def take(self, request_id: str | None) -> RequestOutput | None:
        """Remove and return the oldest output, of a request or of any; None if there is none."""
        if request_id is None:
            if not self._outputs:
                return None
            number, output = self._outputs.popitem(last=False)
        else:
            if request_id not in self._numbers:
                return None
            number = self._numbers[request_id][0]
            output = self._outputs.pop(number)
        numbers = self._numbers.get(output.request_id)
        if numbers is not None and numbers[0] == number:
            numbers.popleft()
            if not numbers:
                del self._numbers[output.request_id]
        return output

    def finished(self) -> dict[str, RequestOutput]:
        """Return the final ones among them by request id; they stay."""
        return {out.request_id: out for out in self._outputs.values() if out.is_finished()}
