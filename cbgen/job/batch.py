"""The one loop from records to output rows.

    reader thread --records--> preparer thread --requests--> engine thread
                                       |                          |
                                     errors                    outputs
                                       +-------> results <--------+
                                                    |
                                       rows(), on the caller's thread

A row is in flight from its preparation until its output row is given out, and has a request for
each of its samples. The number of requests that run or wait is bounded (by one group of rows more
than was asked for, since how many samples a row wants is known once it is prepared), and so is the
number of records read ahead, so memory does not grow with the file. Each
thread hands over groups of what is there, and none waits for a full group: rows of a slow pipe are
answered as they come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cbgen.engine.events import StepStats
from cbgen.engine.request import GenerationOutput, Request
from cbgen.errors import EngineError, RowError, UsageError
from cbgen.io.reader import Record
from cbgen.job.answers import AnswerBuilder
from cbgen.job.channel import Channel, ChannelClosed
from cbgen.job.in_flight import EndedRow, RowsInFlight
from cbgen.job.prepare import PreparedRow, Preparer
from cbgen.job.report.statistics import JobStatistics
from cbgen.job.slots import Slots

_GROUP = 64
"""Most records that are tokenized together."""

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
    failure: UsageError | None = None
    """What keeps the input from being read any further."""


class Results:
    """Where the preparer's failures and the engine's outputs meet; the sink of the engine."""

    def __init__(self) -> None:
        self.channel: Channel[GenerationOutput | PreparedRow | _InputEnd] = Channel()

    def put(self, outputs: Sequence[GenerationOutput]) -> None:
        """Take requests that have ended."""
        try:
            self.channel.put_all(outputs)
        except ChannelClosed:
            return  # the job was given up; nobody wants these any more

    def fail(self, error: EngineError) -> None:
        """Learn that the engine has died."""
        self.channel.fail(error)


class BatchJob:
    """Answers records.

    Args:
        preparer: makes requests of records.
        answers: makes output rows of outputs.
        engine: runs requests; its sink is `results`.
        results: where outputs arrive.
        statistics: is kept up to date.
        max_in_flight: requests that may be in flight at once, and rows.
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
        self._results = results.channel
        self._statistics = statistics
        self._records: Channel[Record] = Channel(capacity=max_in_flight)
        self._slots = Slots(max_in_flight)
        self._in_flight = RowsInFlight(engine.cancel)
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
        self._engine.wind_down(time.monotonic() + grace)

    def rows(
        self, records: Iterable[Record], *, on_idle: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield index and output row of every record, as they finish. To be called once.

        Args:
            records: are read on another thread, a bounded number ahead.
            on_idle: called about once a second while no row finishes.

        Raises:
            EngineError: the engine failed.
            UsageError: the input cannot be read any further; the rows before that were given.
        """
        self._start("cbgen-reader", lambda: self._read(records))
        self._start("cbgen-preparer", self._prepare)
        num_rows: int | None = None
        failure: UsageError | None = None
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
                    ended = self._ended(item)
                    if ended is not None and self._stops_early and ended.was_cut_short:
                        num_dropped += 1
                        continue
                    if ended is not None:
                        yield self._finish(ended)
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

    def _start(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except ChannelClosed:
                return  # the job was given up
            except BaseException as error:  # noqa: BLE001  it goes on in the caller's thread
                self._results.fail(error)

        # A daemon: it may be waiting for a pipe that nobody closes when the process shall end.
        threading.Thread(target=run, name=name, daemon=True).start()

    def _read(self, records: Iterable[Record]) -> None:
        num_records = 0
        try:
            for record in records:
                self._records.put(record)
                self._statistics.rows_read += 1
                num_records += 1
        except ChannelClosed:
            raise  # no failure: no more records are wanted
        except UsageError as error:
            self._records.fail(error)
            return  # it is told behind the rows before it
        except BaseException as error:
            self._records.fail(error)
            raise
        self._num_records = num_records
        self._statistics.input_ended = True
        self._records.close()

    def _prepare(self) -> None:
        num_rows = 0
        failure: UsageError | None = None
        while granted := self._slots.acquire(_GROUP):
            try:
                records = self._records.take(granted)
            except UsageError as error:
                failure = error
                break
            self._slots.release(granted - len(records))
            if not records or self._stops_early:
                break
            num_rows += len(records)
            rows = self._preparer.prepare(records)
            for row in rows:
                if row.error is not None:
                    self._results.put(row)
                else:
                    self._in_flight.add(row)
            requests = self._preparer.submission(rows)
            if requests:
                num_ready = sum(row.error is None for row in rows)
                self._slots.take_more(len(requests) - num_ready)  # each row has one already
                self._engine.submit(requests)
        self._results.put(_InputEnd(num_rows, failure))

    def _ended(self, item: GenerationOutput | PreparedRow) -> EndedRow | None:
        """Return the row that an item completes, None where samples of it are missing."""
        return EndedRow(item) if isinstance(item, PreparedRow) else self._in_flight.take(item)

    def _finish(self, ended: EndedRow) -> tuple[int, dict[str, Any]]:
        statistics = self._statistics
        row, outputs = ended.row, ended.outputs
        record = row.record
        statistics.has_batch_lines |= record.dialect is not None
        try:
            if row.error is not None:
                raise row.error
            assert row.settings is not None, "a row with requests has its settings"
            output_row = self._answers.answer(record, outputs, row.settings)
        except RowError as error:
            statistics.count_failure(error.code)
            return record.index, self._answers.failure(record, error)
        statistics.count_answer(
            [str(output.finish_reason) for output in outputs],
            prompt_tokens=len(outputs[0].prompt_ids),
            completion_tokens=sum(len(output.generated_tokens) for output in outputs),
        )
        return record.index, output_row
