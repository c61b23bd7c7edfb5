"""Brings outputs from the engine's thread to whoever waits for them.

An output goes to the first of these that there is: everybody who follows its request, one caller
who waits for that id, one caller who waits for any; else it is kept until somebody asks. Nobody
polls: each waiting caller has a mailbox of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import Empty
from typing import NamedTuple

from cbgen.engine.request import FinishReason, RequestStatus
from cbgen.errors import EngineError
from cbgen.manager.kept import KeptOutputs
from cbgen.manager.leaving import LeavingLock
from cbgen.manager.mail import Closed, Mail, Mailbox, MailboxGone
from cbgen.manager.outputs import EngineDied, Progress, RequestOutput
from cbgen.manager.unanswered import UnansweredRequests
from cbgen.manager.waiters import Waiter, Waiters, WouldWait

FAILED_CODE = "engine_error"

Unread = Callable[[], Iterable[RequestOutput]]
"""Takes what nobody has read out of a mailbox."""


class _Leaver(NamedTuple):
    """A follower that has gone away."""

    request_ids: tuple[str, ...]
    mailbox: Mailbox
    unread: Unread


class OutputRouter:
    """Owns the outputs that nobody has fetched yet, and knows who waits.

    All methods are thread-safe; what the engine's thread calls never blocks.
    """

    def __init__(self) -> None:
        self._lock = LeavingLock[_Leaver](self._settle)
        self._unanswered = UnansweredRequests()
        self._kept = KeptOutputs()
        self._waiters = Waiters()
        self._followers: dict[str, list[Mailbox]] = {}
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
            self._has_begun = bool(self._unanswered or self._kept)

    def expect(self, samples: Sequence[Progress], follower: Mailbox | None = None) -> bool:
        """Note a request that will be answered; False if an unanswered one has its id.

        Args:
            samples: the request, and behind it further samples of it.
            follower: is sent all of their outputs.
        """
        with self._lock:
            is_new = self._unanswered.add(samples)
            self._has_begun |= is_new
            if is_new and follower is not None:
                for sample in samples:
                    self._followers.setdefault(sample.request.request_id, []).append(follower)
            return is_new

    def forget(self, request_ids: Iterable[str]) -> None:
        """Take back `expect`: the request did not reach the engine."""
        with self._lock:
            for request_id in request_ids:
                self._unanswered.remove(request_id)
            self._end_iterations()

    def is_known(self, request_id: str) -> bool:
        """Whether a request of that id is under way, or has outputs that nobody has fetched."""
        with self._lock:
            return request_id in self._unanswered or request_id in self._kept

    def cancel(self, request_id: str) -> list[str]:
        """Note that a request is cancelled; return its unanswered samples."""
        with self._lock:
            return self._unanswered.cancel(request_id)

    def was_cancelled(self, request_id: str) -> bool:
        """Whether an unanswered request was cancelled."""
        return self._unanswered.is_cancelled(request_id)

    def put(self, outputs: Sequence[RequestOutput]) -> None:
        """Deliver outputs."""
        with self._lock:
            for output in outputs:
                if output.is_finished():
                    self._unanswered.answer(output.request_id)
                self._deliver(output)
            self._end_iterations()

    def put_apart(self, output: RequestOutput) -> None:
        """Deliver an output to whoever takes any: its id belongs to another request."""
        with self._lock:
            self._has_begun = True
            self._deliver_to_anybody(output, is_apart=True)
            self._end_iterations()

    def close(self, failure: EngineError | None = None) -> None:
        """Tell everybody that no more outputs will come; what is kept can still be fetched."""
        with self._lock:
            self._closed = Closed(failure)
            self._waiters.end_all(self._closed)
            for request_id, mailboxes in list(self._followers.items()):
                progress = self._unanswered.get(request_id)
                output = _failed(progress, failure) if progress and failure else None
                for mailbox in mailboxes:
                    self.is_failure_told |= _put(mailbox, Closed(failure, output))
            self._followers.clear()
            for request_id in list(self._unanswered):
                self._unanswered.remove(request_id)

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
            WouldWait: it may not.
        """
        with self._lock:
            kept = self._kept.take(request_id)
            if kept is not None:
                return kept
            if self._closed is not None:
                self._raise_failure(self._closed)
                return None
            if self._is_new or (ends_when_answered and self._is_all_answered()):
                return None
            if not may_wait:
                raise WouldWait
            waiter = Waiter(request_id, ends_when_answered)
            self._waiters.add(waiter)
        item: Mail | None
        try:
            item = waiter.mailbox.get(timeout=timeout)
        except Empty:
            item = self._leave(waiter)
        except BaseException:  # interrupted: what was handed over must not be lost
            late = self._leave(waiter)
            if isinstance(late, RequestOutput):
                self.give_back([late])
            raise
        if not isinstance(item, Closed):
            return item
        with self._lock:
            self._raise_failure(item)
        return None

    def follow(
        self, request_ids: Iterable[str], mailbox: Mailbox, *, also_later: bool = False
    ) -> set[str]:
        """Send all outputs of some requests to a mailbox from now on, kept ones included.

        Args:
            request_ids: may be those of requests to come.
            mailbox: takes them.
            also_later: an id that was answered may be used again, and that request is meant.

        Returns:
            The ids of requests of which nothing comes: others have fetched the final output.
        """
        gone = set()
        with self._lock:
            for request_id in request_ids:
                while (kept := self._kept.take(request_id)) is not None:
                    mailbox.put(kept)
                    if kept.is_finished():
                        break
                else:
                    if self._closed is not None:
                        mailbox.put(self._closed)
                    elif self._unanswered.was_answered(request_id) and not also_later:
                        gone.add(request_id)
                    else:
                        self._followers.setdefault(request_id, []).append(mailbox)
        return gone

    def unfollow(self, request_ids: Iterable[str], mailbox: Mailbox, unread: Unread) -> None:
        """Send nothing more to a mailbox, and deliver again what nobody has read in it.

        Never waits: the garbage collector may call this.
        """
        self._lock.leave(_Leaver(tuple(request_ids), mailbox, unread))

    def give_back(self, outputs: Iterable[RequestOutput]) -> None:
        """Deliver outputs again that a caller was handed and did not read."""
        with self._lock:
            for output in outputs:
                self._deliver(output)

    def lose(self, failure: EngineError) -> None:
        """Close without telling anybody: those who waited are in the process that was forked.

        The lock may be held by a thread that does not exist here.
        """
        self._lock = LeavingLock[_Leaver](self._settle)
        self._waiters = Waiters()
        self._followers.clear()
        self._closed = Closed(failure)

    def death(self, failure: EngineError) -> EngineDied:
        """Return an exception for one caller who learns of a failure."""
        with self._lock:
            return self._death(failure)

    def _settle(self, leaver: _Leaver) -> None:
        for request_id in leaver.request_ids:
            boxes = [b for b in self._followers.pop(request_id, ()) if b is not leaver.mailbox]
            if boxes:
                self._followers[request_id] = boxes
        for output in leaver.unread():
            self._deliver(output)

    def _deliver(self, output: RequestOutput) -> None:
        """Hand an output over; the lock is held."""
        request_id = output.request_id
        mailboxes = self._followers.get(request_id)
        if mailboxes is not None:
            if output.is_finished():
                del self._followers[request_id]
            reached = [mailbox for mailbox in mailboxes if _put(mailbox, output)]
            if reached:
                if request_id in self._followers:
                    self._followers[request_id] = reached
                return
            self._followers.pop(request_id, None)
        if not self._waiters.serve(request_id, output):
            self._deliver_to_anybody(output)

    def _deliver_to_anybody(self, output: RequestOutput, *, is_apart: bool = False) -> None:
        if not self._waiters.serve(None, output):
            self._kept.add(output, has_id=not is_apart)

    def _is_all_answered(self) -> bool:
        return self._has_begun and not self._unanswered

    def _end_iterations(self) -> None:  # the lock is held
        if self._is_all_answered():
            self._waiters.end_answered(Closed())

    def _leave(self, waiter: Waiter) -> Mail | None:
        """Stop waiting; return what arrived in the very last moment."""
        with self._lock:
            self._waiters.remove(waiter)
        return waiter.arrived()

    def _raise_failure(self, closed: Closed) -> None:
        if closed.failure is not None:
            raise self._death(closed.failure)

    def _death(self, failure: EngineError) -> EngineDied:
        self.is_failure_told = True
        return _died(failure, self._kept.finished())


def _failed(progress: Progress, failure: EngineError) -> RequestOutput:
    """Return a request as it stood when the engine died."""
    output = progress.request.output()
    output.status = RequestStatus.FAILED
    output.finish_reason = FinishReason.ERROR
    output.error = str(failure)
    output.error_code = FAILED_CODE
    return progress.finish(output)


def _put(mailbox: Mailbox, item: Mail) -> bool:
    try:
        mailbox.put(item)
    except MailboxGone:
        return False
    return True


def _died(failure: EngineError, finished: Mapping[str, RequestOutput]) -> EngineDied:
    # Each caller gets its own: one object raised by many threads would mix up their tracebacks.
    died = EngineDied(str(failure), finished)
    died.__cause__ = failure.__cause__ or failure
    return died
