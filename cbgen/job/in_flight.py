"""The rows whose requests the engine has, and what came back of those that are not complete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cbgen.engine.request import GenerationOutput, RequestStatus
from cbgen.job.prepare import PreparedRow


@dataclass(frozen=True, slots=True)
class EndedRow:
    """A row of which nothing more will come."""

    row: PreparedRow
    outputs: tuple[GenerationOutput, ...] = ()
    """One for each of its requests, in their order; none where it was no request."""

    @property
    def was_cut_short(self) -> bool:
        """Whether a request was cancelled for another reason than the failure of its row."""
        statuses = {output.status for output in self.outputs}
        return RequestStatus.CANCELLED in statuses and RequestStatus.FAILED not in statuses


@dataclass(slots=True)
class _Row:
    row: PreparedRow
    outputs: dict[str, GenerationOutput] = field(default_factory=dict)
    is_lost: bool = False


class RowsInFlight:
    """Brings the outputs of a row's requests together.

    A row is answered by all of its samples or not at all: when one fails or is cancelled, those
    that still run are cancelled. One thread calls `add`, before it hands the requests on, and
    another one `take`.

    Args:
        cancel: ends the request with an id, if it still runs; its output comes all the same.
    """

    def __init__(self, cancel: Callable[[str], None]) -> None:
        self._cancel = cancel
        self._rows: dict[str, _Row] = {}  # by request id

    def add(self, row: PreparedRow) -> None:
        """Expect an output for each request of a row."""
        held = _Row(row)
        for request in row.requests:
            self._rows[request.request_id] = held

    def take(self, output: GenerationOutput) -> EndedRow | None:
        """Take an output; return its row once all of them are there."""
        held = self._rows.pop(output.request_id)
        held.outputs[output.request_id] = output
        requests = held.row.requests
        if len(held.outputs) == len(requests):
            outputs = (held.outputs[request.request_id] for request in requests)
            return EndedRow(held.row, tuple(outputs))
        if output.status is not RequestStatus.FINISHED and not held.is_lost:
            held.is_lost = True
            for request in requests:
                if request.request_id not in held.outputs:
                    self._cancel(request.request_id)
        return None
