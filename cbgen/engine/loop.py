"""The engine's thread: takes requests and cancellations, steps, hands outputs to a sink.

This is the engine's one failure boundary. An error of one request never gets here, it is in that
request's output; whatever is raised here ended the engine, and the sink is told the cause.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from cbgen.engine.core import Engine
from cbgen.engine.events import StepStats
from cbgen.engine.request import GenerationOutput, Request, RequestStatus
from cbgen.errors import EngineError


class OutputSink(Protocol):
    """Takes the requests that have ended. Called on the engine's thread; no method may block."""

    def put(self, outputs: Sequence[GenerationOutput]) -> object:
        """Take requests that have ended, in the order in which they ended."""

    def close(self, failure: EngineError | None) -> None:
        """Be told that the thread ends; `failure` is what ended the engine, None after a stop."""


class EngineLoop:
    """Runs an engine on a thread of its own. All methods are thread-safe.

    Lifecycle: start, submit and cancel, stop. A stopped loop is not started again.

    Attributes:
        failure: what ended the engine; None while it lives and after a stop.
        is_stopping: whether it takes no more requests.
        has_ended: whether no step will run any more.

    Args:
        engine: is used by the loop's thread alone.
        sink: gets the outputs.
        max_queue_size: requests that may wait for admission before `submit` blocks; 0 = any number.
        on_step: called on the engine's thread after each step, before outputs of that step are put.
    """

    def __init__(
        self,
        engine: Engine,
        sink: OutputSink,
        *,
        max_queue_size: int = 0,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._sink = sink
        self._max_queue_size = max_queue_size
        self._on_step = on_step
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # the engine's thread waits here
        self._has_room = threading.Condition(self._lock)  # submitters wait here
        self._has_parked = threading.Condition(self._lock)  # those who pause wait here
        self._new_requests: list[Request] = []  # handed in, and not yet taken by the engine
        self._cancellations: list[str] = []
        self._num_queued = 0  # handed to the engine and not yet admitted
        self._deadline: float | None = None
        self._num_pauses = 0
        self._is_parked = False
        self._must_reset_prefixes = True  # weights may have changed since the engine's last step
        self.is_stopping = False
        self.has_ended = False
        self.failure: EngineError | None = None
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="cbgen-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(
        self,
        requests: Sequence[Request],
        *,
        may_wait: bool = True,
        on_refused: Callable[[Sequence[Request]], None] = lambda _: None,
    ) -> None:
        """Queue requests; each ends in exactly one output.

        Args:
            requests: are queued one by one as there is room, so some may be queued, and be
                answered, when this raises.
            may_wait: wait while `max_queue_size` requests wait for admission; else the queue grows.
            on_refused: is told which are not queued when this raises.

        Raises:
            EngineError: the loop was stopped, or has died; the cause is attached.
        """
        left = deque(requests)
        with self._lock:
            try:
                while True:
                    self._refuse_after_the_end()
                    room = self._room(len(left)) if may_wait else len(left)
                    self._new_requests.extend(left.popleft() for _ in range(room))
                    self._changed.notify()
                    if not left:
                        return
                    self._has_room.wait()
            except BaseException:  # stopped, or interrupted while it waited
                on_refused(list(left))
                raise

    def cancel(self, request_id: str) -> None:
        """End a request with what it has; its output comes with status CANCELLED."""
        with self._lock:
            self._cancellations.append(request_id)
            self._changed.notify()

    def pause(self) -> None:
        """Return once no step runs; none begins before `resume`. Requests stay as they are.

        Requests can be added and cancelled meanwhile. May be called several times, from any thread
        but the engine's; each call wants its own `resume`.

        Raises:
            EngineError: the loop has ended; the cause is attached if it has died.
        """
        with self._lock:
            self._num_pauses += 1
            self._changed.notify()
            try:
                self._has_parked.wait_for(lambda: self._is_parked or self.has_ended)
                if self.has_ended:
                    self._refuse_after_the_end()
            except BaseException:  # it has ended, or the caller was interrupted
                self._num_pauses -= 1
                self._changed.notify()
                raise

    def resume(self) -> None:
        """Take back one `pause`; after the last one the engine goes on, its prefix cache dropped.

        Weights may have been changed in between, and cached keys and values with them.
        """
        with self._lock:
            self._num_pauses -= 1
            self._changed.notify()

    def wind_down(self, deadline: float) -> None:
        """Start no more requests: cancel those that wait now, and those that run at the deadline.

        Args:
            deadline: seconds of `time.monotonic()`; of several calls the earliest one counts.
        """
        with self._lock:
            self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
            self._changed.notify()

    def stats(self) -> StepStats:
        """Return counts as of the last step."""
        return self._stats

    def stop(self, *, hard_stop: bool = False, timeout: float | None = None) -> bool:
        """End the thread: after all requests are finished, or at once with `hard_stop`.

        A hard stop cancels what is unfinished; the outputs hold the tokens so far. A paused loop
        ends when it is resumed.

        Returns:
            Whether the thread has ended within `timeout` seconds (None = wait for it).
        """
        if hard_stop:
            self.wind_down(time.monotonic())
        with self._lock:
            self.is_stopping = True
            self._changed.notify()
            self._has_room.notify_all()
        return self.join(timeout)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end of the thread; True if it has come within `timeout` seconds."""
        if self._thread.ident not in (None, threading.get_ident()):
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _refuse_after_the_end(self) -> None:
        if self.failure is not None:
            raise EngineError(str(self.failure)) from self.failure
        if self.is_stopping:
            raise EngineError("the engine is stopped and takes no more requests")

    def _room(self, wanted: int) -> int:
        """Return how many of `wanted` requests the queue has room for."""
        if self._max_queue_size == 0:
            return wanted
        waiting = len(self._new_requests) + self._num_queued
        return max(0, min(wanted, self._max_queue_size - waiting))

    def _run(self) -> None:
        failure: EngineError | None = None
        try:
            while self._run_once():
                pass
        except BaseException as error:  # noqa: BLE001  the failure boundary; the cause goes to all
            failure = _failure(error)
        with self._lock:
            self.failure = failure
            self.has_ended = True
            self.is_stopping = True
            self._has_room.notify_all()
            self._has_parked.notify_all()
        self._sink.close(failure)

    def _run_once(self) -> bool:
        """Give the engine what has come in and run a step, none while paused.

        Returns:
            False if the loop is to end.
        """
        with self._lock:
            if not self._wait_for_work():
                return False
            requests, self._new_requests = self._new_requests, []
            cancellations, self._cancellations = self._cancellations, []
            self._num_queued += len(requests)
            is_parked = self._num_pauses > 0
            self._set_parked(is_parked)
            must_reset = self._must_reset_prefixes and not is_parked
            self._must_reset_prefixes = is_parked
            deadline = self._deadline
        for request in requests:
            self._engine.add(request)
        for request_id in cancellations:
            self._engine.cancel(request_id)
        if deadline is not None:
            _cancel_for_deadline(self._engine, is_over=time.monotonic() >= deadline)
        if is_parked:
            outputs = self._engine.take_outputs()
        else:
            if must_reset:
                self._engine.reset_prefix_cache()
            outputs = self._engine.step()
            self._on_step()
        self._stats = self._engine.stats()
        if self._max_queue_size:
            with self._lock:
                self._num_queued = self._stats.num_waiting
                self._has_room.notify_all()
        if outputs:
            self._sink.put(outputs)
        return True

    def _wait_for_work(self) -> bool:
        """Return True once there is something to do, False to end the loop. Holds the lock."""
        while not (self._new_requests or self._cancellations):
            has_unfinished = self._engine.has_unfinished()
            if self._num_pauses:
                self._set_parked(True)
                seconds_left = None
                if has_unfinished and self._deadline is not None:
                    seconds_left = self._deadline - time.monotonic()
                    if seconds_left <= 0:
                        return True
                self._changed.wait(seconds_left)
            elif has_unfinished:
                return True
            elif self.is_stopping:
                return False
            else:
                self._changed.wait()
        return True

    def _set_parked(self, is_parked: bool) -> None:
        self._is_parked = is_parked
        if is_parked:
            self._must_reset_prefixes = True
            self._has_parked.notify_all()


def _failure(error: BaseException) -> EngineError:
    kind, reason = type(error).__name__, str(error).strip()
    failure = EngineError(
        f"the engine failed: {kind}: {reason}" if reason else f"the engine failed: {kind}"
    )
    failure.__cause__ = error
    return failure


def _cancel_for_deadline(engine: Engine, *, is_over: bool) -> None:
    """Cancel all requests, or before the deadline those that have not run yet."""
    for request in engine.unfinished():
        has_run = request.status is not RequestStatus.PENDING or request.num_preemptions > 0
        if is_over or not has_run:
            engine.cancel(request.request_id)
