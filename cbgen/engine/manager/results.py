"""How callers fetch outputs: one by one, as they come, of one request, on threads or asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from queue import Empty, SimpleQueue

from cbgen.engine.manager.mailboxes import AsyncMailbox, CallbackMailbox
from cbgen.engine.manager.router import Closed, Mail, OutputRouter
from cbgen.engine.manager.streams import RequestOutput


class ResultReader:
    """The reading half of the manager. An output is given to one caller, once.

    Outputs that nobody waits for are kept, also beyond a stop. All methods raise EngineDied if the
    engine died and nothing is left to fetch.
    """

    def __init__(self, router: OutputRouter) -> None:
        self._router = router

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> RequestOutput | None:
        """Return the next output, of a request or of any, waiting for it if need be.

        Args:
            request_id: None = any request.
            timeout: seconds; None = any time.

        Returns:
            None when the time is over, and when no more outputs come since the manager does not
            run.

        Raises:
            EngineDied: the engine has failed and nothing is left to fetch.
        """
        return self._router.take(request_id, timeout=timeout)

    def __iter__(self) -> Iterator[RequestOutput]:
        """Yield outputs as they come, until every request that was added is answered.

        Waits for a first request if there was none yet; ends when the manager stops.
        """
        while (output := self._router.take(ends_when_answered=True)) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[RequestOutput]:
        """Yield the outputs of one request until it has ended; each token if it streams."""
        yield from self._follow([request_id])

    def as_completed(self, request_ids: Iterable[str]) -> Iterator[RequestOutput]:
        """Yield the final outputs of some requests as they end."""
        wanted = list(dict.fromkeys(request_ids))
        return (output for output in self._follow(wanted) if output.is_finished())

    async def request_id_aiter(self, request_id: str) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of one request until it has ended, for use in an event loop."""
        mailbox = AsyncMailbox()
        self._router.follow([request_id], mailbox)
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

    def register_result_handler(
        self, request_id: str, callback: Callable[[RequestOutput], object]
    ) -> None:
        """Call a function on the running event loop with each output of a request.

        The last call has the final output; a request that failed with the engine comes so too.

        Raises:
            RuntimeError: no event loop runs in this thread.
        """
        self._router.follow([request_id], CallbackMailbox(callback))

    def _follow(self, request_ids: list[str]) -> Iterator[RequestOutput]:
        mailbox: SimpleQueue[Mail] = SimpleQueue()
        unended = set(request_ids)
        self._router.follow(request_ids, mailbox)
        try:
            while unended:
                item = mailbox.get()
                if isinstance(item, Closed):
                    self._raise_failure(item)
                    return
                if item.is_finished():
                    unended.discard(item.request_id)
                yield item
        finally:
            self._router.unfollow(unended, mailbox, partial(_drain, mailbox))

    def _raise_failure(self, closed: Closed) -> None:
        if closed.failure is not None:
            raise self._router.death(closed.failure)


def _drain(mailbox: SimpleQueue[Mail]) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while True:
        try:
            item = mailbox.get_nowait()
        except Empty:
            return outputs
        if isinstance(item, RequestOutput):
            outputs.append(item)
