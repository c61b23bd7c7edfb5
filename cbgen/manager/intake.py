"""Where requests come in: they are named, prepared, and handed to the session, or kept for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from cbgen.engine.request import FinishReason, RequestStatus
from cbgen.engine.text.detokenizer import Decoder
from cbgen.errors import EngineError
from cbgen.generation.resolve import GenerationSettings
from cbgen.manager.lifecycle import Lifecycle
from cbgen.manager.mail import Mailbox
from cbgen.manager.outputs import ManagerStopped
from cbgen.manager.requests import (
    PreparedRequest,
    RequestForm,
    duplicate_output,
    prepare,
)
from cbgen.manager.router import OutputRouter
from cbgen.manager.running import EXITING, running
from cbgen.manager.session import Session

logger = logging.getLogger(__name__)


class Intake:
    """Owns the names of requests and those that came before the first start. Thread-safe.

    Args:
        lifecycle: has the session.
        router: is told of every request before the session is.
        settings: how requests are answered.
        tokenizer: for the text of streams.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        router: OutputRouter,
        settings: GenerationSettings,
        tokenizer: Decoder | None,
    ) -> None:
        self._lifecycle = lifecycle
        self._router = router
        self._settings = settings
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._num_named = 0
        self._before_start: list[PreparedRequest] = []

    def change_settings(self, settings: GenerationSettings, tokenizer: Decoder | None) -> None:
        """Answer requests that come from now on with other settings."""
        self._settings, self._tokenizer = settings, tokenizer

    def start(self) -> bool:
        """Start the session and hand it what came before; False if one runs already.

        Raises:
            UsageError, RuntimeError: as `Lifecycle.start`.
        """
        # A pause that this waits for may be held by a thread that adds requests.
        with self._lifecycle.starting(), self._lock:
            if not self._lifecycle.start():
                return False
            early, self._before_start = self._before_start, []
            self._submit(early, may_wait=False)
            return True

    def add(
        self,
        given: Sequence[tuple[str | None, list[int], RequestForm]],
        follower: Mailbox | None = None,
    ) -> list[tuple[str, ...]]:
        """Take requests; what is wrong with one becomes its output. See `RequestAdder.add`."""
        if not self._lifecycle.is_new and self._lifecycle.session is None:
            raise self._refusal()
        ready: list[PreparedRequest] = []
        ids: list[tuple[str, ...]] = []
        for given_name, prompt_ids, form in given:
            name = self._new_name() if given_name is None else given_name
            prepared = prepare(name, prompt_ids, form, self._settings, self._tokenizer)
            ids.append(prepared.ids)
            if not self._router.expect(prepared.samples, follower):
                self._router.put_apart(duplicate_output(name, prompt_ids))
            elif prepared.is_over:
                self._router.put(prepared.outputs())
            else:
                ready.append(prepared)
        with self._lock:
            if self._lifecycle.is_new:
                self._before_start += ready
                return ids
        self._submit(ready, may_wait=not self._lifecycle.is_pausing())
        return ids

    def cancel(self, request_id: str) -> None:
        """End a request and its further samples; unknown ones and those that ended are ignored."""
        samples = self._router.cancel(request_id)
        with self._lock:
            if self._lifecycle.is_new:
                self._cancel_early(samples)
                return
        session = self._lifecycle.session
        if session is not None:
            for sample in samples:
                session.cancel(sample)

    def _new_name(self) -> str:
        with self._lock:
            while True:
                name = f"req_{self._num_named}"
                self._num_named += 1
                if not self._router.is_known(name):
                    return name

    def _submit(self, prepared: Sequence[PreparedRequest], *, may_wait: bool) -> None:
        samples = [sample for item in prepared for sample in item.samples]
        session = self._lifecycle.session
        if session is not None:
            try:
                session.submit(samples, may_wait=may_wait)
                return
            except EngineError:
                logger.debug("the engine ended while requests were added", exc_info=True)
        else:
            for item in prepared:
                self._router.forget(item.ids)
        raise self._refusal(session)

    def _refusal(self, session: Session | None = None) -> EngineError:
        """Return why no requests are taken."""
        failure = self._lifecycle.failure
        if failure is None and session is not None:
            failure = session.failure
        if failure is not None:
            return self._router.death(failure)
        if running.is_exiting:
            return ManagerStopped(EXITING)
        if self._lifecycle.is_destroyed:
            return ManagerStopped("the manager was destroyed and takes no requests; make a new one")
        return ManagerStopped(
            "the manager was stopped and takes no requests; start() lets it take them again"
        )

    def _cancel_early(self, samples: Sequence[str]) -> None:
        """Cancel requests that wait for the start; the lock is held."""
        kept = []
        for item in self._before_start:
            if item.ids[0] not in samples:
                kept.append(item)
                continue
            for sample in item.samples:
                sample.request.finish(RequestStatus.CANCELLED, FinishReason.CANCELLED)
            self._router.put(item.outputs())
        self._before_start = kept
