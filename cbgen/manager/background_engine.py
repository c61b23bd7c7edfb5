"""The engine of a manager, on a thread of its own from `start` to the end of `stop`.

Engines' threads are daemons, so that a forgotten stop does not keep the process alive. One that is
killed inside of torch may take the interpreter down with it, so each is stopped at the exit.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  its hook has to be registered before the one below
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from transformers import PreTrainedModel

from cbgen.engine.build import BuiltEngine, build_engine
from cbgen.engine.loop import EngineLoop
from cbgen.engine.model.attach import attached
from cbgen.engine.request import GenerationOutput
from cbgen.errors import EngineError, UsageError
from cbgen.manager.configs import EngineSetup
from cbgen.manager.model_loan import shared_model
from cbgen.manager.outputs import ManagerStopped
from cbgen.manager.router import OutputRouter

logger = logging.getLogger(__name__)

EXIT_SECONDS = 10.0
_EXITING = (
    "the main thread has ended, and with it the manager takes no more requests; let the main "
    "thread wait for the threads that use the manager (join) and then stop() it"
)
_FORKED = (
    "the process was forked, and the engine runs in the one it was forked from; use the manager "
    "there, or make one with a model that is loaded here"
)


class BackgroundEngine:
    """Owns the engine and its thread, and borrows the model while it runs. Thread-safe.

    Can be started again after it has stopped or died, until it is destroyed.

    Attributes:
        model: is borrowed while the engine runs, but for pauses.
        built: the engine that runs, or that is kept for the next start; None if there is none.
        failure: what ended the engine; None while it runs and after a stop.
        is_destroyed: whether it can never be started again.
    """

    def __init__(self, model: PreTrainedModel, setup: EngineSetup, router: OutputRouter) -> None:
        self.model = model
        self.built: BuiltEngine | None = None
        self.failure: EngineError | None = None
        self.is_destroyed = False
        self._setup = setup
        self._router = router
        self._shared = shared_model(model)
        self._lock = threading.RLock()
        self._loop: EngineLoop | None = None  # from start to end
        self._was_started = False
        self._keeps_engine = False
        self._is_hard_stop = False
        self._is_forked = False

    @property
    def loop(self) -> EngineLoop | None:
        """The thread of the engine, None if none runs in this process."""
        return None if self._is_forked else self._loop

    @property
    def is_new(self) -> bool:
        """Whether it was never started."""
        return not (self._was_started or self.is_destroyed)

    @property
    def is_warm(self) -> bool:
        """Whether an engine is there."""
        return self.built is not None and not self._is_forked

    @property
    def is_held(self) -> bool:
        """Whether a pause holds it, so that it runs nothing."""
        return self._shared.is_paused

    def change_setup(self, setup: EngineSetup) -> None:
        """Build engines in another way from now on.

        Raises:
            UsageError: the running engine would have to be another one.
        """
        with self._lock:
            names = self._setup.differences(setup)
            if names and self._loop is not None:
                raise UsageError(
                    f"{', '.join(names)} cannot change while the manager runs; stop it first"
                )
            if names:
                self.built = None
            self._setup = setup

    def warmup(self) -> None:
        """Build the engine, if there is none.

        Raises:
            UsageError: model or settings are not supported.
        """
        with self._shared.starting(), self._lock:
            self._refuse_if_unusable()
            if self._loop is None:
                self._build()

    def start(self) -> bool:
        """Start the thread, inside of `SharedModel.starting`; False if it runs already.

        Raises:
            UsageError: model or settings are not supported.
            RuntimeError: it is destroyed, or still stopping.
        """
        with self._lock:
            self._refuse_if_unusable()
            if self._loop is not None:
                if self._loop.is_stopping:
                    raise RuntimeError(
                        "the manager is still stopping; wait for it with stop() before start()"
                    )
                return False
            loop = EngineLoop(
                self._build().engine,
                self,
                max_queue_size=self._setup.config.max_queue_size,
                on_step=self._router.advance,
            )
            self.failure = None
            self._keeps_engine = self._is_hard_stop = False
            self._router.open()
            self._loop = loop
            self._shared.add(loop)
            running_engines.add(self)
            try:
                loop.start()
            except RuntimeError:  # the system has no thread for it
                self.close(None)
                raise
            self._was_started = True
            return True

    def stop(self, *, hard_stop: bool, timeout: float | None, keeps_engine: bool = False) -> bool:
        """End the thread, see `EngineLoop.stop`; with `hard_stop` unfinished requests fail.

        Returns:
            Whether it has ended within `timeout` seconds.

        Raises:
            RuntimeError: the calling thread holds a pause.
        """
        self._refuse_to_wait_in_a_pause()
        with self._lock:
            self._keeps_engine = keeps_engine
        has_ended = self.stop_loop(hard_stop=hard_stop, timeout=timeout)
        if has_ended and not keeps_engine and self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        return has_ended

    def stop_loop(self, *, hard_stop: bool, timeout: float | None) -> bool:
        """Stop as `stop` does, also in a thread that holds a pause; for the exit of the process."""
        loop = self.loop
        if loop is None:
            return True
        if hard_stop:
            self._is_hard_stop = True
        return loop.stop(hard_stop=hard_stop, timeout=timeout)

    def join(self, timeout: float | None) -> bool:
        """Wait for the end of the thread; True if it has come within `timeout` seconds.

        Raises:
            RuntimeError: the calling thread holds a pause.
        """
        self._refuse_to_wait_in_a_pause()
        loop = self.loop
        return loop is None or loop.join(timeout)

    def abandon(self) -> None:
        """End the thread of a manager that nobody has any more."""
        logger.warning(
            "a manager was dropped while it ran; what was unfinished is ended. Call stop(), or use "
            "continuous_batching_context_manager"
        )
        self.stop(hard_stop=True, timeout=None)

    def destroy(self) -> None:
        """Let go of everything; a thread that still stops ends by itself."""
        with self._lock:
            self.is_destroyed = True
            self._keeps_engine = False
            if self._loop is None:
                self.built = None
                self._router.close(self.failure)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Hold this engine and all others of the model between two steps, the model given back.

        Raises:
            RuntimeError: it does not run.
        """
        loop = self.loop
        if loop is None:
            if self.failure is not None:
                raise self._router.death(self.failure)
            raise ManagerStopped("cannot pause: the manager does not run")
        with ExitStack() as stack:
            try:
                stack.enter_context(self._shared.pause(loop))
            except EngineError as error:
                failure = loop.failure
                if failure is not None:
                    raise self._router.death(failure) from failure.__cause__
                raise ManagerStopped("cannot pause: the manager has just stopped") from error
            yield

    def refusal(self, failure: EngineError | None = None) -> EngineError:
        """Return why no requests are taken, for one caller.

        Args:
            failure: what ended the engine, where that is known earlier than here.
        """
        failure = self.failure or failure
        if failure is not None:
            return self._router.death(failure)
        if running_engines.is_exiting:
            return ManagerStopped(_EXITING)
        if self.is_destroyed:
            return ManagerStopped("the manager was destroyed and takes no requests; make a new one")
        return ManagerStopped(
            "the manager was stopped and takes no requests; start() lets it take them again"
        )

    def after_fork(self) -> None:
        """Take note in a forked process that the engine's thread is not in it."""
        self._is_forked = True
        self._lock = threading.RLock()  # the old one may be held by a thread that is not here
        self.failure = EngineError(_FORKED)
        self._router.after_fork(self.failure)

    def put(self, outputs: Sequence[GenerationOutput]) -> None:
        """Pass on requests that have ended; called by the loop."""
        self._router.put(outputs, is_hard_stop=self._is_hard_stop)

    def close(self, failure: EngineError | None) -> None:
        """Give the model back and tell everybody; called on the engine's thread at its end."""
        assert self._loop is not None
        running_engines.discard(self)
        self._shared.remove(self._loop)
        with self._lock:
            self._loop = None
            self.failure = failure
            if failure is not None or not self._keeps_engine:
                self.built = None
            # With the lock, so that the router is not open again for another start.
            self._router.close(failure)

    def _build(self) -> BuiltEngine:
        """Return the kept engine if it still fits the model, else a new one. Holds the lock."""
        if self.built is not None:
            facts = self.built.facts
            if (facts.dtype, facts.device) != (self.model.dtype, self.model.device):
                self.built = None  # the model was moved or converted
        if self.built is None:
            setup = self._setup
            with attached(self.model):
                self.built = build_engine(
                    self.model, setup.config, setup.attn_implementation, hints=setup.hints
                )
        return self.built

    def _refuse_if_unusable(self) -> None:
        if self.is_destroyed:
            raise ManagerStopped("the manager was destroyed; make a new one")
        if self._is_forked:
            raise ManagerStopped(_FORKED)

    def _refuse_to_wait_in_a_pause(self) -> None:
        if self._shared.is_pausing():
            raise RuntimeError(
                "the end of a manager cannot be waited for inside of a pause() of its model, which "
                "holds it; leave the pause first"
            )


class RunningEngines:
    """Owns the list of engines that run. Takes no locks: a fork could leave them locked for ever.

    Attributes:
        is_exiting: whether the main thread has ended.
    """

    def __init__(self) -> None:
        self.is_exiting = False
        self._engines: set[BackgroundEngine] = set()
        self._ending_threads: set[threading.Thread] = set()

    def add(self, engine: BackgroundEngine) -> None:
        """Note one that has started."""
        self._engines.add(engine)

    def discard(self, engine: BackgroundEngine) -> None:
        """Forget one that has ended, but for the thread; called on it."""
        ended = [thread for thread in list(self._ending_threads) if not thread.is_alive()]
        self._ending_threads.difference_update(ended)
        self._ending_threads.add(threading.current_thread())
        self._engines.discard(engine)

    def end_waits(self) -> None:
        """Let no thread wait for ever for requests that the main thread can no longer add.

        What was added is answered, unless the main thread has failed.
        """
        self.is_exiting = True
        has_failed = getattr(sys, "last_value", None) is not None
        for engine in list(self._engines):
            engine.stop_loop(hard_stop=has_failed, timeout=0)

    def stop_all(self) -> None:
        """Stop them at the exit; one that a pause holds runs nothing and can be left alone."""
        engines = [engine for engine in list(self._engines) if not engine.is_held]
        for engine in engines:
            engine.stop_loop(hard_stop=True, timeout=0)
        deadline = time.monotonic() + EXIT_SECONDS
        for engine in engines:
            engine.stop_loop(hard_stop=True, timeout=max(0.0, deadline - time.monotonic()))
        for thread in self._ending_threads - {threading.current_thread()}:
            thread.join(max(0.0, deadline - time.monotonic()))

    def after_fork(self) -> None:
        """Forget those of the process that this one was forked from, and let them know."""
        engines, self._engines = self._engines, set()
        self._ending_threads = set()
        for engine in engines:
            engine.after_fork()


running_engines = RunningEngines()
atexit.register(running_engines.stop_all)
os.register_at_fork(after_in_child=running_engines.after_fork)
# Not public, but how executors do it: unlike atexit it comes before threads are waited for. The
# last to register is called first, so here before executors wait for their threads.
if hasattr(threading, "_register_atexit"):
    threading._register_atexit(running_engines.end_waits)
