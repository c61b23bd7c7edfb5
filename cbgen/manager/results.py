"""How callers fetch outputs: one by one, as they come, of one request, on threads or asyncio."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from queue import Empty, SimpleQueue

from cbgen.manager.mail import Closed, Mail
from cbgen.manager.mailboxes import AsyncMailbox, CallbackMailbox
from cbgen.manager.outputs import RequestOutput
from cbgen.manager.requests import check_request_id
from cbgen.manager.router import OutputRouter
from cbgen.manager.waiters import WouldWait
from cbgen.values import show_argument

_IN_A_PAUSE = (
    "outputs cannot be waited for inside of a pause() of the model, in which no request goes on; "
    "leave the pause first, or give get_result() a timeout"
)


class ResultReader:
    """The reading half of the manager. An output is given to one caller, once.

    Outputs that nobody waits for are kept, also beyond a stop. All methods raise EngineDied if the
    engine died and nothing is left to fetch, and RuntimeError where they would wait without a
    timeout in a thread that holds a pause of the model.
    """

    def __init__(self, router: OutputRouter, is_pausing: Callable[[], bool]) -> None:
        self._router = router
        self._is_pausing = is_pausing

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> RequestOutput | None:
        """Return the next output, of a request or of any, waiting for it if need be.

        Args:
            request_id: None = any request. An output is given once, so without a timeout an id
                whose output was fetched waits for another request of that id.
            timeout: seconds; None = any time.

        Returns:
            None when the time is over, and when no more outputs come since the manager does not
            run.

        Raises:
            EngineDied: the engine has failed and nothing is left to fetch.
            TypeError: the id is no text.
        """
        if request_id is not None:
            check_request_id(request_id)
        return self._take(request_id, timeout=timeout)

    def __iter__(self) -> Iterator[RequestOutput]:
        """Yield outputs as they come, until every request that was added is answered.

        Waits for a first request if there was none yet; ends when the manager stops.
        """
        while (output := self._take(ends_when_answered=True)) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[RequestOutput]:
        """Yield the outputs of one request until it has ended; each token if it streams.

        Waits for a request that is not there yet; ends at once where the final output was fetched
        already, as far as that is remembered (the last 10,000 requests).

        Raises:
            TypeError: the id is no text.
        """
        check_request_id(request_id)
        return self._follow([request_id])

    def as_completed(self, request_ids: Iterable[str]) -> Iterator[RequestOutput]:
        """Yield the final outputs of some requests as they end; see `request_id_iter`.

        Raises:
            TypeError: an id is no text, or a single one was given.
        """
        if isinstance(request_ids, str):
            raise TypeError(f"request_ids must be several ids; give [{request_ids!r}]")
        wanted = list(dict.fromkeys(request_ids))
        for request_id in wanted:
            check_request_id(request_id)
        return (output for output in self._follow(wanted) if output.is_finished())

    def request_id_aiter(self, request_id: str) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of one request as `request_id_iter`, for use in an event loop.

        Raises:
            TypeError: the id is no text.
        """
        check_request_id(request_id)
        return self._follow_in_loop(request_id)

    def register_result_handler(
        self, request_id: str, callback: Callable[[RequestOutput], object]
    ) -> None:
        """Call a function on the running event loop with each output of a request.

        The last call has the final output; a request that failed with the engine comes so too.

        Raises:
            RuntimeError: no event loop runs in this thread.
            TypeError: the callback is no function, or an `async` one; the id is no text.
        """
        check_request_id(request_id)
        _check_callback(callback)
        self._router.follow([request_id], CallbackMailbox(callback), also_later=True)

    def _take(
        self,
        request_id: str | None = None,
        *,
        timeout: float | None = None,
        ends_when_answered: bool = False,
    ) -> RequestOutput | None:
        may_wait = timeout is not None or not self._is_pausing()
        try:
            return self._router.take(
                request_id,
                timeout=timeout,
                ends_when_answered=ends_when_answered,
                may_wait=may_wait,
            )
        except WouldWait:
            raise RuntimeError(_IN_A_PAUSE) from None

    def _next(self, mailbox: SimpleQueue[Mail]) -> Mail:
        if not self._is_pausing():
            return mailbox.get()
        try:
            return mailbox.get_nowait()
        except Empty:
            raise RuntimeError(_IN_A_PAUSE) from None

    def _follow(self, request_ids: list[str]) -> Iterator[RequestOutput]:
        mailbox: SimpleQueue[Mail] = SimpleQueue()
        gone = self._router.follow(request_ids, mailbox)
        yield from self._read(mailbox, set(request_ids) - gone)

    def _read(self, mailbox: SimpleQueue[Mail], unended: set[str]) -> Iterator[RequestOutput]:
        try:
            while unended:
                item = self._next(mailbox)
                if isinstance(item, Closed):
                    self._raise_failure(item)
                    return
                if item.is_finished():
                    unended.discard(item.request_id)
                yield item
        finally:
            self._router.unfollow(unended, mailbox, partial(_drain, mailbox))

    async def _follow_in_loop(self, request_id: str) -> AsyncIterator[RequestOutput]:
        mailbox = AsyncMailbox()
        if self._router.follow([request_id], mailbox):
            return
        try:
            while True:
                item = await mailbox.get()
                if isinstance(item, Closed):
                    self._raise_failure(item)
                    return
                yield item
                if item.is_finished():
                    return
        finally:
            self._router.unfollow([request_id], mailbox, mailbox.unread)

    def _raise_failure(self, closed: Closed) -> None:
        if closed.failure is not None:
            raise self._router.death(closed.failure)


def _check_callback(callback: object) -> None:
    if not callable(callback):
        raise TypeError(f"the callback must be a function, got {show_argument(callback)}")
    if inspect.iscoroutinefunction(callback) or inspect.iscoroutinefunction(
        type(callback).__call__
    ):
        raise TypeError(
            "the callback must be a plain function, which is called on the event loop; give "
            "lambda output: asyncio.create_task(callback(output)), or use request_id_aiter"
        )


def _drain(mailbox: SimpleQueue[Mail]) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while True:
        try:
            item = mailbox.get_nowait()
        except Empty:
            return outputs
        if isinstance(item, RequestOutput):
            outputs.append(item)
