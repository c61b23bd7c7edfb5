"""Brings outputs from the engine's thread to whoever waits for them.

An output goes to the first of these that there is: everybody who follows its request, one caller
who waits for that id, one caller who waits for any; else it is kept until somebody asks. Nobody
polls: each waiting caller has a queue of its own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty

from cbgen.engine.request import GenerationOutput, Request, RequestStatus
from cbgen.engine.scheduler.waiting import UnfinishedRequests
from cbgen.errors import EngineError
from cbgen.manager.outputs import EngineDied, RequestOutput, TrackedRequest
from cbgen.manager.receivers import Closed, FollowerQueue, Item, OutputQueue, Receiver

HARD_STOP_CODE = "hard_stop"
FAILED_CODE = "engine_error"
WAITS_IN_A_PAUSE = (
    "outputs cannot be waited for inside of a pause() of the model, in which no request goes on; "
    "leave the pause first, or give get_result() a timeout"
)
_NUM_REMEMBERED = 10_000


class OutputRouter:
    """Owns the outputs that nobody has fetched yet, and knows who waits for what.

    All methods are thread-safe; what the engine's thread calls never blocks.
    """

    def __init__(self) -> None:
        self._lock = DeferringLock()
        self._unanswered: UnfinishedRequests[TrackedRequest] = UnfinishedRequests()
        self._advancing: dict[str, TrackedRequest] = {}  # those of them to look at after each step
        self._answered: dict[str, None] = {}  # the last ids; all would take memory without end
        self._unfetched = _UnfetchedOutputs()
        self._waiters: dict[str | None, dict[_Waiter, None]] = {}  # first come, first served
        self._followers: dict[str, list[Receiver]] = {}
        self._closed: Closed | None = None
        self._is_new = True  # followers may come before the first start
        self._has_begun = False
        self.is_failure_told = False
        """Whether anybody has learned of the failure since the last `open`."""

    def open(self) -> None:
        """Let callers wait again: an engine is there that will answer them."""
        with self._lock:
            self._closed = None
            self._is_new = self.is_failure_told = False
            self._has_begun = bool(self._unanswered or self._unfetched)

    def expect(self, samples: Sequence[TrackedRequest], follower: Receiver | None = None) -> bool:
        """Note a request that will be answered; False if an unanswered one has its id.

        Args:
            samples: the request, and behind it further samples of it.
            follower: is sent all of their outputs.
        """
        with self._lock:
            # The first sample may have ended while others have not.
            if any(self._unanswered.with_samples(sample.request_id) for sample in samples):
                return False
            self._has_begun = True
            for sample in samples:
                name = sample.request_id
                self._unanswered.add(sample)
                self._answered.pop(name, None)
                if sample.has_steps:
                    self._advancing[name] = sample
                if follower is not None:
                    self._followers.setdefault(name, []).append(follower)
            return True

    def forget(self, requests: Iterable[Request]) -> None:
        """Take back `expect`: the requests did not reach the engine."""
        with self._lock:
            for request in requests:
                tracked = self._unanswered.get(request.request_id)
                if tracked is not None:
                    self._remove(tracked)
            self._end_iterations()

    def is_known(self, request_id: str) -> bool:
        """Whether a request of that id is under way, or has outputs that nobody has fetched."""
        with self._lock:
            return request_id in self._unanswered or request_id in self._unfetched

    def cancel(self, request_id: str) -> list[TrackedRequest]:
        """Note that a request is cancelled; return it and its samples, the unanswered ones."""
        with self._lock:
            found = self._unanswered.with_samples(request_id)
            for tracked in found:
                tracked.is_cancelled = True
            return found

    def advance(self) -> None:
        """Deliver what a step has added to requests that stream."""
        if not self._advancing:
            return
        # A list: other threads add to it.
        advanced = [tracked.advance() for tracked in list(self._advancing.values())]
        with self._lock:
            for output in advanced:
                if output is not None:
                    self._deliver(output)

    def put(self, outputs: Sequence[GenerationOutput], *, is_hard_stop: bool = False) -> None:
        """Deliver the final outputs of requests.

        Args:
            outputs: of requests that are expected.
            is_hard_stop: report requests that the stop cut short as failed.
        """
        with self._lock:
            for output in outputs:
                request_id = output.request_id
                tracked = self._unanswered.get(request_id)
                assert tracked is not None, "it is expected"
                self._remove(tracked)
                self._remember(request_id)
                was_cut_short = output.status is RequestStatus.CANCELLED and is_hard_stop
                if was_cut_short and not tracked.is_cancelled:
                    tracked.fail(
                        HARD_STOP_CODE,
                        "the manager was stopped with hard_stop before the request was finished",
                    )
                self._deliver(tracked.final_output())
            self._end_iterations()

    def refuse_duplicate(self, request: TrackedRequest) -> None:
        """Fail a request whose id another one has; whoever takes any output gets its own."""
        request.fail(
            "duplicate_id",
            f"a request with id {request.request_id!r} is still unanswered; choose another id",
        )
        with self._lock:
            self._has_begun = True
            self._deliver_to_one(request.final_output(), None)
            self._end_iterations()

    def close(self, failure: EngineError | None = None) -> None:
        """Tell everybody that no more outputs will come; what is there can still be fetched."""
        with self._lock:
            self._closed = Closed(failure)
            for waiter in [each for waiters in self._waiters.values() for each in waiters]:
                self._end_wait(waiter, self._closed)
            for request_id, receivers in self._followers.items():
                tracked = self._unanswered.get(request_id)
                output = None
                if tracked is not None and failure is not None:
                    tracked.fail(FAILED_CODE, str(failure))
                    output = tracked.final_output()
                for receiver in receivers:
                    self.is_failure_told |= _put(receiver, Closed(failure, output))
            self._followers.clear()
            for tracked in list(self._unanswered):
                self._remove(tracked)

    def take(
        self,
        request_id: str | None = None,
        *,
        timeout: float | None = None,
        ends_when_answered: bool = False,
        may_wait: bool = True,
    ) -> RequestOutput | None:
        """Return the next output, of a request or of any; wait for it if need be.

        Args:
            request_id: None = any.
            timeout: seconds; None = any time.
            ends_when_answered: return None once there have been requests and all are answered.
            may_wait: False = raise in place of waiting.

        Returns:
            None after the timeout, when no more outputs come, and before the first `open`.

        Raises:
            EngineDied: the engine has failed and nothing is left to fetch.
            RuntimeError: it would have to wait and may not.
        """
        waiter = None
        with self._lock:
            item = self._unfetched.take(request_id) or self._closed
            if item is None:
                if self._is_new or (ends_when_answered and self._is_all_answered()):
                    return None
                if not may_wait:
                    raise RuntimeError(WAITS_IN_A_PAUSE)
                waiter = _Waiter(request_id, ends_when_answered)
                self._waiters.setdefault(request_id, {})[waiter] = None
        if waiter is not None:
            item = self._wait(waiter, timeout)
        return None if item is None else self.output_of(item)

    def output_of(self, item: Item) -> RequestOutput | None:
        """Return the output that was received; None if no more will come.

        Raises:
            EngineDied: no more will come because the engine has failed.
        """
        if not isinstance(item, Closed):
            return item
        if item.failure is not None:
            raise self.death(item.failure)
        return None

    def follow(
        self, request_ids: Iterable[str], receiver: Receiver, *, also_later: bool = False
    ) -> set[str]:
        """Send all outputs of some requests to a receiver from now on, those at hand included.

        Args:
            request_ids: may be those of requests to come.
            receiver: takes them.
            also_later: an id that was answered may be used again, and that request is meant.

        Returns:
            The ids of requests of which nothing comes: others have fetched the final output.
        """
        gone = set()
        with self._lock:
            for request_id in request_ids:
                while (output := self._unfetched.take(request_id)) is not None:
                    receiver.put(output)
                    if output.is_finished():
                        break
                else:
                    if self._closed is not None:
                        receiver.put(self._closed)
                    elif request_id in self._answered and not also_later:
                        gone.add(request_id)
                    else:
                        self._followers.setdefault(request_id, []).append(receiver)
        return gone

    def unfollow(self, request_ids: Iterable[str], queue: FollowerQueue) -> None:
        """Send nothing more to a queue, and deliver again what nobody has read in it.

        Never waits: the garbage collector may call this.
        """
        self._lock.call(partial(self._unfollow, tuple(request_ids), queue))

    def after_fork(self, failure: EngineError) -> None:
        """Close in a forked process without telling anybody: those who wait are not in it."""
        self._lock = DeferringLock()  # the old one may be held by a thread that is not here
        self._waiters.clear()
        self._followers.clear()
        self._closed = Closed(failure)

    def death(self, failure: EngineError) -> EngineDied:
        """Return an exception for one caller who learns of a failure."""
        with self._lock:
            self.is_failure_told = True
            finished = self._unfetched.finished()
        # Each caller gets its own: one object raised by many threads would mix up their tracebacks.
        died = EngineDied(str(failure), finished)
        died.__cause__ = failure.__cause__ or failure
        return died

    def _remove(self, tracked: TrackedRequest) -> None:
        """Forget an unanswered request; the lock is held."""
        self._unanswered.remove(tracked)
        self._advancing.pop(tracked.request_id, None)

    def _remember(self, request_id: str) -> None:
        self._answered[request_id] = None
        if len(self._answered) > _NUM_REMEMBERED:
            del self._answered[next(iter(self._answered))]

    def _unfollow(self, request_ids: tuple[str, ...], queue: FollowerQueue) -> None:
        for request_id in request_ids:
            others = [item for item in self._followers.pop(request_id, ()) if item is not queue]
            if others:
                self._followers[request_id] = others
        for output in queue.unread():
            self._deliver(output)

    def _deliver(self, output: RequestOutput) -> None:
        """Hand an output over; the lock is held."""
        request_id = output.request_id
        receivers = self._followers.pop(request_id, ())
        reached = [receiver for receiver in receivers if _put(receiver, output)]
        if reached:
            if not output.is_finished():
                self._followers[request_id] = reached
        else:
            self._deliver_to_one(output, request_id, None)

    def _deliver_to_one(self, output: RequestOutput, *request_ids: str | None) -> None:
        """Hand an output to the first who waits for one of some ids, else keep it for them."""
        for request_id in request_ids:
            for waiter in self._waiters.get(request_id, ()):
                self._end_wait(waiter, output)
                return
        self._unfetched.add(output, request_ids[0])

    def _is_all_answered(self) -> bool:
        return self._has_begun and not self._unanswered

    def _end_iterations(self) -> None:  # the lock is held
        if self._is_all_answered():
            for waiter in list(self._waiters.get(None, ())):
                if waiter.ends_when_answered:
                    self._end_wait(waiter, Closed())

    def _end_wait(self, waiter: _Waiter, item: Item | None = None) -> None:
        """Let a caller go, if it still waits, and hand it an item; the lock is held."""
        waiters = self._waiters.get(waiter.request_id, {})
        waiters.pop(waiter, None)
        if not waiters:
            self._waiters.pop(waiter.request_id, None)
        if item is not None:
            waiter.queue.put(item)

    def _wait(self, waiter: _Waiter, timeout: float | None) -> Item | None:
        try:
            return waiter.queue.get(timeout=timeout)
        except BaseException as error:  # the time is over, or the caller was interrupted
            with self._lock:
                self._end_wait(waiter)
                late = None if waiter.queue.empty() else waiter.queue.get()
                if isinstance(error, Empty):
                    return late
                if isinstance(late, RequestOutput):  # it must not be lost
                    self._deliver(late)
            raise


class DeferringLock:
    """A lock for which the garbage collector never waits; not reentrant.

    An abandoned stream is closed by the garbage collector, which runs on any thread at any moment,
    also while that thread holds the lock. What it wants done is done by whoever holds the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deferred: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._call_deferred()

    def __exit__(self, *_exception: object) -> None:
        self._lock.release()
        self._call_if_free()

    def call(self, function: Callable[[], None]) -> None:
        """Call a function with the lock held: now if nobody holds it, else once it is free."""
        self._deferred.append(function)
        self._call_if_free()

    def _call_if_free(self) -> None:
        while self._deferred and self._lock.acquire(blocking=False):
            try:
                self._call_deferred()
            finally:
                self._lock.release()

    def _call_deferred(self) -> None:
        while self._deferred:
            self._deferred.popleft()()


class _UnfetchedOutputs:
    """Outputs that nobody has fetched yet, in their order, also found by their request's id.

    Not thread-safe: the router's lock guards it.
    """

    def __init__(self) -> None:
        self._outputs: OrderedDict[int, tuple[str | None, RequestOutput]] = OrderedDict()
        self._numbers: dict[str | None, deque[int]] = {}  # of an id, oldest first
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._outputs)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._numbers

    def add(self, output: RequestOutput, request_id: str | None) -> None:
        """Keep an output; with None in place of an id it goes only to who asks for any."""
        self._num_added += 1
        self._outputs[self._num_added] = request_id, output
        self._numbers.setdefault(request_id, deque()).append(self._num_added)

    def take(self, request_id: str | None) -> RequestOutput | None:
        """Remove and return the oldest output, of a request or of any; None if there is none."""
        numbers = self._outputs if request_id is None else self._numbers.get(request_id, ())
        number = next(iter(numbers), None)
        if number is None:
            return None
        key, output = self._outputs.pop(number)
        self._numbers[key].popleft()
        if not self._numbers[key]:
            del self._numbers[key]
        return output

    def finished(self) -> dict[str, RequestOutput]:
        """Return the final ones among them by request id; they stay."""
        return {out.request_id: out for _, out in self._outputs.values() if out.is_finished()}


@dataclass(eq=False, slots=True)
class _Waiter:
    """A caller who waits for one output, of a request or of any (None)."""

    request_id: str | None
    ends_when_answered: bool
    queue: OutputQueue = field(default_factory=OutputQueue)


def _put(receiver: Receiver, item: Item) -> bool:
    try:
        receiver.put(item)
    except RuntimeError:  # its event loop is closed, so nobody reads it
        return False
    return True
