"""One run of the manager, from start to stop: an engine on its thread, and a model on loan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from transformers import PreTrainedModel

from cbgen.engine.build import BuiltEngine, build_engine, plan_facts
from cbgen.engine.events import StepStats
from cbgen.engine.loop import EngineLoop
from cbgen.engine.model.probe import probe_model, run_model
from cbgen.engine.plan import resolve
from cbgen.engine.request import FinishReason, GenerationOutput, Request, RequestStatus
from cbgen.errors import EngineError
from cbgen.manager.configs import EngineSetup
from cbgen.manager.model_loan import LentModel
from cbgen.manager.outputs import Progress, RequestOutput
from cbgen.manager.router import OutputRouter
from cbgen.manager.running import running
from cbgen.manager.sharing import users_of

HARD_STOP_CODE = "hard_stop"
LOST = (
    "the process was forked, and the engine runs in the one it was forked from; use the manager "
    "there, or make one with a model that is loaded here"
)


def build(model: PreTrainedModel, setup: EngineSetup) -> BuiltEngine:
    """Probe a model and build an engine for it; the model is as it was afterwards.

    Raises:
        UsageError: the model does not obey the hook, or what was asked does not fit the machine.
    """
    lent = LentModel(model)
    lent.take()
    try:
        facts = probe_model(model)
        numbers = plan_facts(facts)
        plan = resolve(setup.config, setup.attn_implementation, numbers, setup.hints)
        return BuiltEngine(build_engine(partial(run_model, model), plan, facts), plan, facts)
    finally:
        lent.give_back()


class Session:
    """Runs one engine until it is stopped or dies; the model is then given back.

    Args:
        model: is borrowed from `start` to the end, but for pauses.
        built: its engine.
        router: gets the outputs.
        max_queue_size: see EngineLoop.
        on_end: called on the engine's thread once the model is given back; tells callers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        built: BuiltEngine,
        router: OutputRouter,
        *,
        max_queue_size: int,
        on_end: Callable[[EngineError | None], None],
    ) -> None:
        self.built = built
        self._lent = LentModel(model)
        self._users = users_of(model)
        self._router = router
        self._on_end = on_end
        self._unended: dict[str, Progress] = {}
        self._advancing: dict[str, Progress] = {}  # those of them that want to know of each step
        self._is_hard_stop = False
        self._is_held = False
        self._is_lost = False
        self._loop = EngineLoop(
            built.engine,
            self,
            max_queue_size=max_queue_size,
            on_step=self._stream,
            on_end=self._end,
        )

    def start(self) -> None:
        """Borrow the model and start the thread."""
        self._lent.take()
        try:
            self._loop.start()
        except RuntimeError:  # the system has no thread for it
            self._lent.give_back()
            raise
        self._users.add(self)
        running.add(self)

    @property
    def failure(self) -> EngineError | None:
        """What ended the engine, None while it lives and after a stop."""
        return self._loop.failure

    @property
    def is_stopping(self) -> bool:
        """Whether it takes no more requests."""
        return self._loop.is_stopping

    @property
    def is_held(self) -> bool:
        """Whether a pause holds it."""
        return self._is_held

    @property
    def is_lost(self) -> bool:
        """Whether it runs in the process that this one was forked from."""
        return self._is_lost

    def stats(self) -> StepStats:
        """Return counts as of the last step."""
        return self._loop.stats()

    def submit(self, samples: Sequence[Progress], *, may_wait: bool) -> None:
        """Queue requests, which the router expects.

        Args:
            samples: the requests and their progress.
            may_wait: see `EngineLoop.submit`.

        Raises:
            EngineError: the engine is stopped or has died.
        """
        for sample in samples:
            request_id = sample.request.request_id
            self._unended[request_id] = sample
            if sample.has_steps:
                self._advancing[request_id] = sample
        requests = [sample.request for sample in samples]
        self._loop.submit(requests, may_wait=may_wait, on_refused=self._forget)

    def cancel(self, request_id: str) -> None:
        """End a request with what it has."""
        self._loop.cancel(request_id)

    def stop(self, *, hard_stop: bool, timeout: float | None) -> bool:
        """End the thread, see `EngineLoop.stop`; with `hard_stop` unfinished requests fail."""
        if hard_stop:
            self._is_hard_stop = True
        return self._loop.stop(hard_stop=hard_stop, timeout=timeout)

    def join(self, timeout: float | None) -> bool:
        """Wait for the end, see `EngineLoop.join`."""
        return self._loop.join(timeout)

    def hold(self) -> None:
        """Return once no step runs and the model is given back; `release` ends this.

        Raises:
            EngineError: the engine has ended; the model is given back all the same.
        """
        try:
            self._loop.pause()
        except EngineError:
            self._lent.give_back()
            raise
        self._lent.give_back()
        self._is_held = True

    def release(self) -> None:
        """Take back `hold`."""
        self._is_held = False
        self._lent.take()
        self._loop.resume()
        if self._loop.has_ended:  # it died while it was held
            self._lent.give_back()

    def lose(self) -> None:
        """Learn that this process was forked and has no thread for the engine."""
        self._is_lost = True
        self._router.lose(EngineError(LOST))

    def put(self, outputs: Sequence[GenerationOutput]) -> None:
        """Pass on requests that have ended; called by the loop."""
        self._router.put([self._final(output) for output in outputs])

    def fail(self, error: EngineError) -> None:
        """Do nothing: everybody was told of the failure by `on_end`."""

    def _forget(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._let_go(request.request_id)
        self._router.forget([request.request_id for request in requests])

    def _let_go(self, request_id: str) -> Progress:
        self._advancing.pop(request_id, None)
        return self._unended.pop(request_id)

    def _final(self, output: GenerationOutput) -> RequestOutput:
        was_cut_short = output.status is RequestStatus.CANCELLED and self._is_hard_stop
        if was_cut_short and not self._router.was_cancelled(output.request_id):
            output.status = RequestStatus.FAILED
            output.finish_reason = FinishReason.ERROR
            output.error = "the manager was stopped with hard_stop before the request was finished"
            output.error_code = HARD_STOP_CODE
        return self._let_go(output.request_id).finish(output)

    def _stream(self) -> None:
        if not self._advancing:
            return
        # A list: other threads add to it.
        advanced = [progress.advance() for progress in list(self._advancing.values())]
        outputs = [output for output in advanced if output is not None]
        if outputs:
            self._router.put(outputs)

    def _end(self) -> None:
        running.discard(self)
        self._lent.give_back()
        self._users.remove(self)  # not earlier: a pause is to find the model given back
        self._on_end(self._loop.failure)
