"""The engine's thread: takes requests and cancellations, steps, hands outputs to a sink.

This is the engine's one failure boundary. An error of one request never gets here, it is in that
request's output; whatever is raised here ended the engine, and the sink is told the cause.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from cbgen.engine.core import Engine
from cbgen.engine.events import StepStats
from cbgen.engine.request import GenerationOutput, Request, RequestStatus
from cbgen.errors import EngineError

logger = logging.getLogger(__name__)


class OutputSink(Protocol):
    """Where finished requests go. Called on the engine's thread; neither method may block."""

    def put(self, outputs: Sequence[GenerationOutput]) -> None:
        """Take requests that have ended, in the order in which they ended."""

    def fail(self, error: EngineError) -> None:
        """Learn that the engine has died; no more outputs follow."""


class EngineLoop:
    """Runs an engine on a thread of its own. All methods are thread-safe.

    Lifecycle: start, submit and cancel, stop. A stopped loop is not started again.
    """

    def __init__(self, engine: Engine, sink: OutputSink) -> None:
        self._engine = engine
        self._sink = sink
        self._changed = threading.Condition()
        self._new_requests: list[Request] = []
        self._cancellations: list[str] = []
        self._deadline: float | None = None
        self._is_stopping = False
        self._failure: EngineError | None = None
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="cbgen-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; each ends in exactly one output.

        Raises:
            EngineError: the loop was stopped, or has died; the cause is attached.
        """
        with self._changed:
            if self._failure is not None:
                raise EngineError(str(self._failure)) from self._failure
            if self._is_stopping:
                raise EngineError("the engine is stopped and takes no more requests")
            self._new_requests.extend(requests)
            self._changed.notify()

    def cancel(self, request_id: str) -> None:
        """End a request with what it has; its output comes with status CANCELLED."""
        with self._changed:
            self._cancellations.append(request_id)
            self._changed.notify()

    def wind_down(self, deadline: float) -> None:
        """Begin nothing any more: what waits is cancelled now, what runs at the deadline.

        Args:
            deadline: seconds of `time.monotonic()`; of several calls the earliest one counts.
        """
        with self._changed:
            self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
            self._changed.notify()

    def stats(self) -> StepStats:
        """Return counts as of the last step."""
        return self._stats

    def stop(self, *, hard_stop: bool = False, timeout: float | None = None) -> bool:
        """End the thread: after all requests are finished, or at once with `hard_stop`.

        A hard stop cancels what is unfinished; the outputs hold the tokens so far.

        Returns:
            Whether the thread has ended within `timeout` seconds (None = wait for it).
        """
        if hard_stop:
            self.wind_down(time.monotonic())
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._take_news():
                outputs = self._engine.step()
                self._stats = self._engine.stats()
                if outputs:
                    self._sink.put(outputs)
        except BaseException as error:  # noqa: BLE001  the failure boundary; the cause goes to all
            reason = str(error).strip() or type(error).__name__
            failure = EngineError(f"the engine failed: {reason}")
            failure.__cause__ = error
            with self._changed:
                self._failure = failure
            self._sink.fail(failure)

    def _take_news(self) -> bool:
        """Hand news to the engine, waiting while there is nothing to do; False to end the loop."""
        with self._changed:
            while not (self._new_requests or self._cancellations or self._engine.has_unfinished()):
                if self._is_stopping:
                    return False
                self._changed.wait()
            requests, self._new_requests = self._new_requests, []
            cancellations, self._cancellations = self._cancellations, []
            deadline = self._deadline
        for request in requests:
            self._engine.add(request)
        for request_id in cancellations:
            self._engine.cancel(request_id)
        if deadline is not None:
            self._cancel_what_shall_not_run(time.monotonic() >= deadline)
        return True

    def _cancel_what_shall_not_run(self, is_over: bool) -> None:
        """Cancel everything, or before the deadline what has not run yet."""
        for request in self._engine.unfinished():
            has_run = request.status is not RequestStatus.PENDING or request.num_preemptions > 0
            if is_over or not has_run:
                self._engine.cancel(request.request_id)
