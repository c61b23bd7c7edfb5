"""The public manager: requests in from any thread, outputs out to whoever waits for them."""

from __future__ import annotations

import _thread
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue

from transformers import PreTrainedModel

from cbgen.engine.events import StepStats
from cbgen.engine.text.detokenizer import Decoder
from cbgen.generation.resolve import GenerationSettings
from cbgen.manager.adding import RequestAdder
from cbgen.manager.configs import EngineSetup
from cbgen.manager.intake import Intake
from cbgen.manager.lifecycle import Lifecycle
from cbgen.manager.mail import Mail
from cbgen.manager.outputs import RequestOutput
from cbgen.manager.requests import RequestForm
from cbgen.manager.results import ResultReader
from cbgen.manager.router import OutputRouter

logger = logging.getLogger(__name__)

_KEPT_NAME = "_cbgen_manager"


class ContinuousBatchingManager(RequestAdder, ResultReader):
    """Answers requests of many threads with one model, in the background.

    Made by `cbgen.init_continuous_batching` and `cbgen.continuous_batching_context_manager`. All
    methods are thread-safe. Between `start` and the end of `stop` the model is borrowed: its
    attention goes to the engine and it is in evaluation mode; otherwise it is as it was.

    Every request ends in exactly one output with a final status, also one that is wrong
    (FAILED, `error` says why), cancelled (CANCELLED, with the tokens so far) or cut short by a hard
    stop (FAILED, with the tokens so far). A manager that is dropped while it runs is stopped so.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        setup: EngineSetup,
        settings: GenerationSettings,
        tokenizer: Decoder | None = None,
    ) -> None:
        router = OutputRouter()
        self._lifecycle = Lifecycle(model, setup, router)
        RequestAdder.__init__(self, Intake(self._lifecycle, router, settings, tokenizer))
        ResultReader.__init__(self, router, self._lifecycle.is_pausing)
        # Weak: a kept manager lives with its model, which must not live for ever.
        weakref.finalize(self, _abandon, weakref.ref(self._lifecycle)).atexit = False

    def start(self) -> None:
        """Start the background thread; requests that were added before begin to run.

        Raises:
            UsageError: the model, or what was asked of the engine, is not supported.
            RuntimeError: the manager was destroyed or is still stopping, or called from inside of a
                `pause` of the model.
        """
        if not self._intake.start():
            logger.warning("the manager runs already; start() changes nothing")

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Take no more requests and end the background thread once all are answered.

        Args:
            block: wait for the end, of which the outputs that are still there can be fetched after.
            timeout: seconds to wait; the thread goes on to its end if they are over.
            keep_for_next_session: keep the engine's memory, and the manager with the model, where
                the functions that make managers find it.
            hard_stop: end what is unfinished now; it fails, with the tokens so far.

        Raises:
            RuntimeError: called from inside of a `pause` of the model.
        """
        lifecycle = self._lifecycle
        if lifecycle.session is None:
            logger.warning("the manager does not run; stop() changes nothing")
            return
        has_ended = lifecycle.stop(
            hard_stop=hard_stop,
            timeout=timeout if block else 0.0,
            keeps_engine=keep_for_next_session,
        )
        if block and not has_ended:
            logger.warning("the manager did not end within %s s; it goes on to its end", timeout)
        if keep_for_next_session and lifecycle.failure is None:
            lifecycle.model.__dict__[_KEPT_NAME] = _KeptManager(self)

    def join(self, stop_trigger_time: float | None = None, timeout: float | None = None) -> None:
        """Wait for the end of the background thread, for which something else has to ask.

        Args:
            stop_trigger_time: has no effect; transformers logs how long ago that was.
            timeout: seconds to wait; None = any time.

        Raises:
            RuntimeError: called from inside of a `pause` of the model.
        """
        if not self._lifecycle.join(timeout):
            logger.warning("the manager did not end within %s s; it goes on to its end", timeout)

    def destroy(self) -> None:
        """Stop, if need be, and let go of everything; the manager cannot be started again."""
        if self.is_running():
            self.stop()
        self.discard()

    def discard(self) -> None:
        """Destroy without waiting: a thread that still stops ends by itself."""
        self._lifecycle.destroy()
        if kept_manager(self._lifecycle.model) is self:
            del self._lifecycle.model.__dict__[_KEPT_NAME]

    def answer(
        self, given: Sequence[tuple[str | None, list[int], RequestForm]]
    ) -> tuple[list[str], Iterator[RequestOutput]]:
        """Add requests as `add`, followed from the start: nobody else gets their outputs.

        Returns:
            The ids of all samples in order, and an iterator over the outputs as they come.

        Raises:
            ManagerStopped, EngineDied, TypeError: as `add_request`.
        """
        mailbox: SimpleQueue[Mail] = SimpleQueue()
        ids = [sample for samples in self.add(given, mailbox) for sample in samples]
        return ids, self._read(mailbox, set(ids))

    def pause(self) -> AbstractContextManager[None]:
        """Hold generation between two steps while a block of code runs.

        The model is given back meanwhile: it can be run, trained and its weights changed in place.
        So every manager of the model is held, and one that is started by another thread waits.
        Requests stay, and can be added and cancelled; cached prefixes are dropped. Several threads
        may hold a pause; generation goes on when the last one leaves.

        Raises:
            RuntimeError: the manager does not run.
        """
        return self._lifecycle.pause()

    def warmup(self) -> None:
        """Build the engine and run the model once, so that `start` is quick.

        Raises:
            UsageError: the model, or what was asked of the engine, is not supported.
        """
        self._lifecycle.warmup()

    @property
    def warmed_up(self) -> bool:
        """Whether the engine is built."""
        return self._lifecycle.is_warm

    @property
    def is_destroyed(self) -> bool:
        """Whether the manager can never be started again."""
        return self._lifecycle.is_destroyed

    @property
    def has_failed(self) -> bool:
        """Whether the engine has died."""
        return self._lifecycle.failure is not None

    def raise_untold_failure(self) -> None:
        """Do nothing, unless the engine has died and no caller has heard of it.

        Raises:
            EngineDied: it has.
        """
        failure = self._lifecycle.failure
        if failure is not None and not self._router.is_failure_told:
            raise self._router.death(failure)

    def is_running(self) -> bool:
        """Whether the background thread runs."""
        return self._lifecycle.session is not None

    def stats(self) -> StepStats:
        """Return counts of the engine as of its last step."""
        return self._lifecycle.stats()

    def reconfigure(
        self, setup: EngineSetup, settings: GenerationSettings, tokenizer: Decoder | None
    ) -> None:
        """Answer requests that are added from now on with other settings.

        Raises:
            UsageError: the running engine would have to be another one.
        """
        self._lifecycle.change_setup(setup)
        self._intake.change_settings(settings, tokenizer)


def _abandon(reference: weakref.ref[Lifecycle]) -> None:
    """End what a manager that is collected has left running.

    The collector calls this, on any thread and at any moment, so it waits for nothing, as starting
    a thread in the common way would.
    """
    lifecycle = reference()
    session = None if lifecycle is None else lifecycle.session
    if lifecycle is not None and session is not None and not session.is_stopping:
        ending = threading.Thread(target=lifecycle.abandon, name="cbgen-abandoned", daemon=True)
        _thread.start_new_thread(ending.start, ())


class _KeptManager:
    """Holds a manager in the attributes of its model; copies and pickles of the model have none."""

    def __init__(self, manager: ContinuousBatchingManager | None = None) -> None:
        self.manager = manager

    def __reduce__(self) -> tuple[type[_KeptManager], tuple[()]]:
        return (_KeptManager, ())


def kept_manager(model: PreTrainedModel) -> ContinuousBatchingManager | None:
    """Return the manager that a stop with `keep_for_next_session` left with a model, or None."""
    kept = model.__dict__.get(_KEPT_NAME)
    return kept.manager if isinstance(kept, _KeptManager) else None
