"""The one loop from records to output rows.

    reader thread --records--> preparer thread --requests--> engine thread
                                       |                          |
                                     errors                    outputs
                                       +-------> results <--------+
                                                    |
                                       rows(), on the caller's thread

A row is in flight from its preparation until its output row is given out, and has a request for
each of its samples. The requests that run or wait, the records read ahead and the bytes of all
their lines are bounded, so memory does not grow with the file. (The bound of requests may be
exceeded by one group of rows: how many samples a row wants is known once it is prepared.) Each
thread hands over groups of what is there, and none waits for a full group: rows of a slow pipe are
answered as they come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from cbgen.engine.events import StepStats
from cbgen.engine.request import GenerationOutput, Request, RequestStatus
from cbgen.errors import RowError, UsageError
from cbgen.io.records import Record
from cbgen.job.answers import AnswerBuilder
from cbgen.job.channel import Channel, Slots
from cbgen.job.preparer import PreparedRow, Preparer
from cbgen.job.report.statistics import JobStatistics

_GROUP = 64
"""Most records that are tokenized together."""

_MAX_BYTES = 32 * 2**20
"""Lines that may have been read and not be answered yet; a longer one is read behind all others."""

_IDLE_SECONDS = 1.0


class EngineService(Protocol):
    """What the job needs of an engine; `EngineLoop` is one, tests have others."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; each ends in exactly one output at the sink."""

    def cancel(self, request_id: str) -> None:
        """End a request with what it has; one that has ended or is unknown is left alone."""

    def wind_down(self, deadline: float) -> None:
        """Cancel what waits now, and what still runs at `deadline` of `time.monotonic()`."""

    def stats(self) -> StepStats:
        """Return counts as of the last step."""


@dataclass(frozen=True, slots=True)
class _InputEnd:
    """Stands behind the last row of the input."""

    num_rows: int
    failure: Exception | None = None
    """Why the input could not be read to its end; of a caller's iterator it may be anything."""


Results: TypeAlias = Channel[GenerationOutput | PreparedRow | _InputEnd]
"""Where the engine's outputs and the rows that failed in preparation meet."""


@dataclass(slots=True)
class RowInFlight:
    """A row and what has come back for its requests so far."""

    row: PreparedRow
    _outputs: dict[str, GenerationOutput] = field(default_factory=dict)
    _is_given_up: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether all of its requests have ended."""
        return len(self._outputs) == len(self.row.requests)

    @property
    def outputs(self) -> list[GenerationOutput]:
        """The outputs of its requests, in the order of the requests. To be read when complete."""
        return [self._outputs[request.request_id] for request in self.row.requests]

    @property
    def was_cut_short(self) -> bool:
        """Whether a request was cancelled for another reason than the failure of its row."""
        statuses = {output.status for output in self._outputs.values()}
        return RequestStatus.CANCELLED in statuses and RequestStatus.FAILED not in statuses

    def take(self, output: GenerationOutput, cancel: Callable[[str], None]) -> None:
        """Take the output of one of its requests, and cancel the others if it cannot be used.

        A row is answered by all of its samples or not at all.
        """
        self._outputs[output.request_id] = output
        if output.status is RequestStatus.FINISHED or self._is_given_up:
            return
        self._is_given_up = True
        for request in self.row.requests:
            if request.request_id not in self._outputs:
                cancel(request.request_id)


class BatchJob:
    """Answers records.

    Args:
        preparer: makes requests of records.
        answers: makes output rows of outputs.
        engine: runs requests; its sink is `results`.
        results: where outputs arrive.
        statistics: is kept up to date.
        max_in_flight: requests, and rows, that may be in flight at once.
    """

    def __init__(
        self,
        *,
        preparer: Preparer,
        answers: AnswerBuilder,
        engine: EngineService,
        results: Results,
        statistics: JobStatistics,
        max_in_flight: int,
    ) -> None:
        self._preparer = preparer
        self._answers = answers
        self._engine = engine
        self._results = results
        self._statistics = statistics
        self._records: Channel[Record] = Channel(capacity=max_in_flight)
        self._slots = Slots(max_in_flight)
        self._bytes = Slots(_MAX_BYTES)
        self._in_flight: dict[str, RowInFlight] = {}  # by request id
        self._num_records: int | None = None  # known once the input has ended
        self._stops_early = False
        self._is_complete = False

    @property
    def is_complete(self) -> bool:
        """Whether `rows` has ended and given a row for every record."""
        return self._is_complete

    def stop_early(self, grace: float = 0.0) -> None:
        """Take no more records; `rows` then ends by itself, with `is_complete` False.

        Rows that run may finish within `grace` seconds; the others get no output row. Any thread
        may call this at any time, and again with less grace.
        """
        self._stops_early = True
        self._statistics.phase = "stopping"
        self._records.close()
        self._slots.close()
        self._bytes.close()
        self._engine.wind_down(time.monotonic() + grace)

    def rows(
        self,
        records: Iterable[Record],
        *,
        on_idle: Callable[[], None] = lambda: None,
        strict: bool = False,
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield index and output row of every record, as they finish. To be called once.

        Args:
            records: are read on another thread, a bounded number ahead.
            on_idle: called about once a second while no row finishes.
            strict: end at the first row that carries an error.

        Raises:
            EngineError: the engine failed.
            Exception: the input cannot be read any further (a `UsageError` if it is a file); the
                rows before that were given.
            UsageError: `strict`, and a row has an error.
        """
        self._start("cbgen-reader", lambda: self._read(records))
        self._start("cbgen-preparer", self._prepare)
        num_rows: int | None = None
        failure: Exception | None = None
        num_given, num_dropped = 0, 0
        try:
            while num_given + num_dropped != num_rows:
                items = self._results.take(timeout=_IDLE_SECONDS)
                self._statistics.engine = self._engine.stats()
                if not items:
                    on_idle()
                for item in items:
                    if isinstance(item, _InputEnd):
                        num_rows, failure = item.num_rows, item.failure
                        continue
                    in_flight = self._take(item)
                    if in_flight.is_complete:
                        self._bytes.release(in_flight.row.record.num_bytes)
                        if self._stops_early and in_flight.was_cut_short:
                            num_dropped += 1
                            continue
                        yield self._finish(in_flight.row, in_flight.outputs, strict=strict)
                        num_given += 1
                    self._slots.release()  # that of the row, or of a sample before its last one
            if failure is not None:
                raise failure
            self._is_complete = num_given == self._num_records
        finally:
            # Nothing blocks on these any more, so the threads end by themselves.
            self._results.close()
            self._records.close()
            self._slots.close()
            self._bytes.close()

    def _start(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  it goes on in the caller's thread
                self._results.close(error)

        # A daemon: it may be waiting for a pipe that nobody closes when the process shall end.
        threading.Thread(target=run, name=name, daemon=True).start()

    def _read(self, records: Iterable[Record]) -> None:
        num_records = 0
        try:
            for record in records:
                if not self._bytes.acquire(1) or not self._records.put((record,)):
                    return  # no more records are wanted
                self._bytes.take_more(record.num_bytes - 1)
                self._statistics.rows_read += 1
                num_records += 1
        except Exception as error:  # noqa: BLE001  it is raised behind the rows before it
            self._records.close(error)
            return
        self._num_records = num_records
        self._statistics.input_ended = True
        self._records.close()

    def _prepare(self) -> None:
        num_rows = 0
        failure: Exception | None = None
        while granted := self._slots.acquire(_GROUP):
            try:
                records = self._records.take(granted)
            except Exception as error:  # noqa: BLE001  that of whoever read the records
                failure = error
                break
            self._slots.release(granted - len(records))
            if not records or self._stops_early:
                break
            num_rows += len(records)
            self._submit(self._preparer.prepare(records))
        self._results.put((_InputEnd(num_rows, failure),))

    def _submit(self, rows: Sequence[PreparedRow]) -> None:
        self._results.put(row for row in rows if row.error is not None)
        ready = [row for row in rows if row.error is None]
        for row in ready:
            in_flight = RowInFlight(row)
            self._in_flight.update((request.request_id, in_flight) for request in row.requests)
        requests = self._preparer.submission(ready)
        if requests:
            self._slots.take_more(len(requests) - len(ready))  # each row has one already
            self._engine.submit(requests)

    def _take(self, item: GenerationOutput | PreparedRow) -> RowInFlight:
        """Return the row that an item belongs to, the item taken into account."""
        if isinstance(item, PreparedRow):
            return RowInFlight(item)
        in_flight = self._in_flight.pop(item.request_id)
        in_flight.take(item, self._engine.cancel)
        return in_flight

    def _finish(
        self, row: PreparedRow, outputs: Sequence[GenerationOutput], *, strict: bool
    ) -> tuple[int, dict[str, Any]]:
        statistics = self._statistics
        record = row.record
        statistics.has_batch_lines |= record.dialect is not None
        if row.error is not None:
            return self._fail(record, row.error, strict=strict)
        assert row.settings is not None, "a row with requests has its settings"
        try:
            output_row = self._answers.answer(record, outputs, row.settings)
        except RowError as error:
            return self._fail(record, error, strict=strict)
        statistics.count_answer(
            [str(output.finish_reason) for output in outputs],
            prompt_tokens=len(outputs[0].prompt_ids),
            completion_tokens=sum(len(output.generated_tokens) for output in outputs),
        )
        return record.index, output_row

    def _fail(self, record: Record, error: RowError, *, strict: bool) -> tuple[int, dict[str, Any]]:
        self._statistics.count_failure(error.code)
        if strict:
            raise UsageError(f"row {record.index}: {error.message} (--strict)") from error
        return record.index, self._answers.failure(record, error)
