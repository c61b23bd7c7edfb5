"""`--trace`: a timeline of the engine in Chrome's trace format, for https://ui.perfetto.dev.

One track has the steps, one more for each row of the engine, with a span for prefill and one for
decode of every request that had the row. Events are written as they end, so memory is bounded and a
killed run leaves a file that opens: the format allows the closing bracket to be missing.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, BinaryIO

from cbgen.engine.events import StepTimes
from cbgen.io.json_values import encode_row
from cbgen.io.output.atomic_file import writable_path

logger = logging.getLogger(__name__)

MOST_BYTES = 2**30
"""Where a trace ends: viewers open no larger ones."""
_BUFFER_BYTES = 2**16
_FLUSH_SECONDS = 1.0
_PROCESS = 1
_STEPS_TRACK = 0


@dataclass(slots=True)
class _Span:
    """What a row does now."""

    request_id: str
    name: str
    started: float
    num_tokens: int


class TraceFile:
    """An engine observer that writes what it is told; all calls come from one thread at a time.

    Args:
        path: of the file, which is replaced.
        most_bytes: what is longer is cut, and said.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, path: str, most_bytes: int = MOST_BYTES) -> None:
        self._path = writable_path(path, "--trace")
        self._file: BinaryIO | None = open(self._path, "wb", buffering=0)  # noqa: SIM115
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._pending = bytearray()
        self._flushed = self._origin = time.perf_counter()
        self._spans: dict[int, _Span] = {}
        self._named_rows: set[int] = set()
        self._write_line(b"[")
        self._name_track("process_name", _STEPS_TRACK, "cbgen")
        self._name_track("thread_name", _STEPS_TRACK, "steps")
        self._flush()

    def admitted(self, row: int, request_id: str, num_tokens: int) -> None:
        """A request took a row: its prefill begins."""
        if row not in self._named_rows:
            self._named_rows.add(row)
            self._name_track("thread_name", row + 1, f"slot {row}")
        self._spans[row] = _Span(request_id, "prefill", time.perf_counter(), num_tokens)

    def decoding(self, row: int) -> None:
        """Prefill ends, decode begins."""
        span = self._end_span(row, {})
        if span is not None:
            self._spans[row] = _Span(span.request_id, "decode", time.perf_counter(), 0)

    def preempted(self, row: int, num_computed_tokens: int) -> None:
        """The row is taken away; that is an instant of its own."""
        span = self._end_span(row, {})
        if span is not None:
            arguments = {"id": span.request_id, "lost_tokens": num_computed_tokens}
            now = self._timestamp(time.perf_counter())
            self._write_event("preempted", "i", row + 1, ts=now, s="t", args=arguments)

    def ended(self, row: int, reason: str, num_generated_tokens: int) -> None:
        """The request leaves its row."""
        self._end_span(row, {"reason": reason, "generated_tokens": num_generated_tokens})

    def stepped(self, times: StepTimes) -> None:
        """One span on the track of the steps."""
        arguments = {
            "step": times.step,
            "tokens": times.num_tokens,
            "requests": times.num_requests,
            "waiting": times.num_waiting,
            "used_blocks": times.num_used_blocks,
            "schedule_us": _microseconds(times.scheduled - times.started),
            "execute_us": _microseconds(times.executed - times.scheduled),
            "update_us": _microseconds(times.updated - times.executed),
        }
        self._write_span("step", _STEPS_TRACK, times.started, times.updated, arguments)

    def close(self) -> None:
        """End the file; rows that still run end here."""
        for row in list(self._spans):
            self._end_span(row, {"reason": "unfinished"})
        self._end_file()

    def _end_span(self, row: int, arguments: dict[str, Any]) -> _Span | None:
        span = self._spans.pop(row, None)
        if span is not None:
            known = {"id": span.request_id, **arguments}
            if span.num_tokens:
                known["tokens"] = span.num_tokens
            self._write_span(span.name, row + 1, span.started, time.perf_counter(), known)
        return span

    def _write_span(
        self, name: str, track: int, started: float, ended: float, arguments: dict[str, Any]
    ) -> None:
        # Of rounded times, so that a span never reaches into the next one.
        timestamp = self._timestamp(started)
        duration = self._timestamp(ended) - timestamp
        self._write_event(name, "X", track, ts=timestamp, dur=duration, args=arguments)

    def _name_track(self, kind: str, track: int, name: str) -> None:
        self._write_event(kind, "M", track, args={"name": name})
        if kind == "thread_name":
            self._write_event("thread_sort_index", "M", track, args={"sort_index": track})

    def _write_event(self, name: str, phase: str, track: int, **fields: object) -> None:
        event = {"name": name, "ph": phase, "pid": _PROCESS, "tid": track, **fields}
        line = encode_row(event).rstrip()
        separator = b",\n" if self._num_bytes > 1 else b"\n"
        if self._num_bytes + len(line) > self._most_bytes and self._file is not None:
            logger.warning("%s: the trace is full; the rest of the run is not in it", self._path)
            self._end_file()
        self._write_line(separator + line)

    def _write_line(self, line: bytes) -> None:
        if self._file is None:
            return
        self._num_bytes += len(line)
        self._pending += line
        is_due = time.perf_counter() - self._flushed > _FLUSH_SECONDS
        if is_due or len(self._pending) > _BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Hand whole events to the system, so that a kill leaves no half one."""
        if self._file is None:
            return
        rest = memoryview(self._pending)
        self._pending = bytearray()
        self._flushed = time.perf_counter()
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            reason = error.strerror or error
            logger.warning("%s: cannot be written: %s; the trace ends here", self._path, reason)
            self._file.close()
            self._file = None

    def _end_file(self) -> None:
        self._write_line(b"\n]\n")
        self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _timestamp(self, moment: float) -> int:
        return _microseconds(moment - self._origin)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
