"""Start, stop, pause and destroy: which session runs, and what is kept between two of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from transformers import PreTrainedModel

from cbgen.engine.build import BuiltEngine
from cbgen.engine.events import StepStats
from cbgen.errors import EngineError, UsageError
from cbgen.manager.configs import EngineSetup
from cbgen.manager.outputs import ManagerStopped
from cbgen.manager.router import OutputRouter
from cbgen.manager.session import LOST, Session, build
from cbgen.manager.sharing import users_of

logger = logging.getLogger(__name__)


class Lifecycle:
    """Owns the session that runs, and between sessions the engine if it is kept.

    Args:
        model: the model; it is borrowed while a session runs.
        setup: how engines are built.
        router: is opened by `start` and closed when a session ends.
    """

    def __init__(self, model: PreTrainedModel, setup: EngineSetup, router: OutputRouter) -> None:
        self.model = model
        self._setup = setup
        self._router = router
        self._lock = threading.RLock()
        self._session: Session | None = None
        self._kept: BuiltEngine | None = None
        self._keeps_engine = False
        self._failure: EngineError | None = None
        self._was_started = False
        self._is_destroyed = False
        self._users = users_of(model)

    @property
    def session(self) -> Session | None:
        """The session that runs in this process, None if there is none."""
        session = self._session
        return None if session is None or session.is_lost else session

    @property
    def failure(self) -> EngineError | None:
        """What ended the last session, None if it lives or was stopped."""
        return EngineError(LOST) if self._is_lost() else self._failure

    @property
    def is_new(self) -> bool:
        """Whether it was never started."""
        return not (self._was_started or self._is_destroyed)

    @property
    def is_destroyed(self) -> bool:
        """Whether it can never be started again."""
        return self._is_destroyed

    @property
    def is_warm(self) -> bool:
        """Whether an engine is there."""
        return self._kept is not None or self.session is not None

    def is_pausing(self) -> bool:
        """Whether the calling thread holds a pause of the model."""
        return self._users.is_pausing()

    def stats(self) -> StepStats:
        """Return counts of the running session as of its last step."""
        session = self.session
        return StepStats() if session is None else session.stats()

    def change_setup(self, setup: EngineSetup) -> None:
        """Build engines in another way from now on.

        Raises:
            UsageError: the running engine would have to be another one.
        """
        with self._lock:
            names = self._setup.differences(setup)
            if names and self._session is not None:
                raise UsageError(
                    f"{', '.join(names)} cannot change while the manager runs; stop it first"
                )
            if names:
                self._kept = None
            self._setup = setup

    def starting(self) -> AbstractContextManager[None]:
        """Keep pauses of the model away from a block that calls `start`; waits for their end.

        Raises:
            RuntimeError: the calling thread holds one.
        """
        return self._users.starting()

    def warmup(self) -> None:
        """Build the engine, if there is none.

        Raises:
            UsageError: model or settings are not supported.
        """
        with self._users.starting(), self._lock:
            self._refuse_if_destroyed()
            if self._session is None:
                self._kept = self._engine()

    def start(self) -> bool:
        """Begin a session, inside of `starting`; False if one runs already.

        Raises:
            UsageError: model or settings are not supported.
            RuntimeError: it is destroyed, or still stopping.
        """
        with self._lock:
            self._refuse_if_destroyed()
            if self._session is not None:
                if self._session.is_stopping:
                    raise RuntimeError(
                        "the manager is still stopping; wait for it with stop() before start()"
                    )
                return False
            built, self._kept = self._engine(), None
            session = Session(
                self.model,
                built,
                self._router,
                max_queue_size=self._setup.config.max_queue_size,
                on_end=self._ended,
            )
            self._failure = None
            self._keeps_engine = False
            self._router.open()
            try:
                session.start()
            except RuntimeError:
                self._router.close()
                raise
            self._session = session
            self._was_started = True
            return True

    def stop(self, *, hard_stop: bool, timeout: float | None, keeps_engine: bool = False) -> bool:
        """End the session.

        Returns:
            Whether it has ended within `timeout` seconds.

        Raises:
            RuntimeError: the calling thread holds a pause.
        """
        self._refuse_to_wait_in_a_pause()
        with self._lock:
            session = self.session
            self._keeps_engine = keeps_engine
        if session is None:
            return True
        has_ended = session.stop(hard_stop=hard_stop, timeout=timeout)
        if has_ended and not keeps_engine and self.model.device.type == "cuda":
            del session
            torch.cuda.empty_cache()
        return has_ended

    def join(self, timeout: float | None) -> bool:
        """Wait for the end of the session; True if it has come within `timeout` seconds.

        Raises:
            RuntimeError: the calling thread holds a pause.
        """
        self._refuse_to_wait_in_a_pause()
        session = self.session
        return session is None or session.join(timeout)

    def abandon(self) -> None:
        """End the session of a manager that nobody has any more."""
        logger.warning(
            "a manager was dropped while it ran; what was unfinished is ended. Call stop(), or use "
            "continuous_batching_context_manager"
        )
        self.stop(hard_stop=True, timeout=None)

    def destroy(self) -> None:
        """Let go of everything; a session that still stops ends by itself."""
        with self._lock:
            self._is_destroyed = True
            self._keeps_engine = False
            self._kept = None
            if self._session is None:
                self._router.close(self._failure)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Hold this engine and all others of the model between two steps, the model given back.

        Raises:
            RuntimeError: no session runs.
        """
        session = self.session
        if session is None:
            if self.failure is not None:
                raise self._router.death(self.failure)
            raise ManagerStopped("cannot pause: the manager does not run")
        with ExitStack() as stack:
            try:
                stack.enter_context(self._users.pause(session))
            except EngineError as error:
                if session.failure is not None:
                    raise self._router.death(session.failure) from session.failure.__cause__
                raise ManagerStopped("cannot pause: the manager has just stopped") from error
            yield

    def _engine(self) -> BuiltEngine:
        """Return the kept engine if it still fits the model, else a new one. Holds the lock."""
        kept = self._kept
        facts = None if kept is None else kept.facts
        if facts is not None and (facts.dtype, facts.device) != (
            self.model.dtype,
            self.model.device,
        ):
            kept = None  # the model was moved or converted
        if kept is None:
            kept = build(self.model, self._setup)
        return kept

    def _refuse_if_destroyed(self) -> None:
        if self._is_destroyed:
            raise ManagerStopped("the manager was destroyed; make a new one")
        if self._is_lost():
            raise ManagerStopped(LOST)

    def _refuse_to_wait_in_a_pause(self) -> None:
        if self.is_pausing():
            raise RuntimeError(
                "the end of a manager cannot be waited for inside of a pause() of its model, which "
                "holds it; leave the pause first"
            )

    def _is_lost(self) -> bool:
        """Whether the session runs in the process that this one was forked from."""
        return self._session is not None and self._session.is_lost

    def _ended(self, failure: EngineError | None) -> None:
        """Take note of the end of the session and tell everybody; called on the engine's thread."""
        with self._lock:
            session, self._session = self._session, None
            self._failure = failure
            if failure is None and self._keeps_engine and session is not None:
                self._kept = session.built
            # With the lock, so that the router is not open again for another session.
            self._router.close(failure)
