"""The public manager: requests in from any thread, outputs out to whoever waits for them."""

from __future__ import annotations

import _thread
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from queue import Empty
from typing import Any, TypeVar

from transformers import GenerationConfig, PreTrainedModel

from cbgen.engine.events import StepStats
from cbgen.engine.request import FinishReason, RequestStatus
from cbgen.engine.sampling.params import SamplingParams
from cbgen.engine.text import TokenDecoder
from cbgen.errors import EngineError, RowError
from cbgen.generation.resolve import GenerationSettings
from cbgen.manager.background_engine import BackgroundEngine
from cbgen.manager.configs import EngineSetup, check_names, generation_fields, set_fields
from cbgen.manager.given_requests import (
    TokenInput,
    TokenInputs,
    check_request_id,
    prompt_id_list,
    prompt_id_lists,
)
from cbgen.manager.model_loan import shared_model
from cbgen.manager.outputs import RequestOutput, TrackedRequest
from cbgen.manager.receivers import AsyncOutputQueue, OutputCallback, OutputQueue
from cbgen.manager.router import WAITS_IN_A_PAUSE, OutputRouter
from cbgen.values import show_argument

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ATTRIBUTE = "_cbgen_manager"


class ContinuousBatchingManager:
    """Answers requests of many threads with one model, in the background.

    Made by `cbgen.init_continuous_batching` and `cbgen.continuous_batching_context_manager`. All
    methods are thread-safe. Between `start` and the end of `stop` the model is borrowed: its
    attention goes to the engine and it is in evaluation mode; otherwise it is as it was.

    Every request ends in exactly one output with a final status, also one that is wrong
    (FAILED, `error` says why), cancelled (CANCELLED, with the tokens so far) or cut short by a hard
    stop (FAILED, with the tokens so far). A manager that is dropped while it runs is stopped so.

    An output is given to one caller, once. Outputs that nobody waits for are kept, also beyond a
    stop. Methods that fetch outputs raise EngineDied if the engine died and nothing is left to
    fetch, and RuntimeError where they would wait without a timeout in a thread that holds a pause
    of the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        setup: EngineSetup,
        settings: GenerationSettings,
        tokenizer: TokenDecoder | None = None,
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._router = OutputRouter()
        self._engine = BackgroundEngine(model, setup, self._router)
        self._shared_model = shared_model(model)
        self._lock = threading.Lock()
        self._num_made_ids = 0
        self._before_start: list[TrackedRequest] = []
        # Weak: a kept manager lives with its model, which must not live for ever.
        weakref.finalize(self, _abandon, weakref.ref(self._engine)).atexit = False

    def start(self) -> None:
        """Start the background thread; requests that were added before begin to run.

        Raises:
            UsageError: the model, or what was asked of the engine, is not supported.
            RuntimeError: the manager was destroyed or is still stopping, or called from inside of a
                `pause` of the model.
        """
        # A pause that this waits for may be held by a thread that adds requests.
        with self._shared_model.starting(), self._lock:
            if not self._engine.start():
                logger.warning("the manager runs already; start() changes nothing")
                return
            early, self._before_start = self._before_start, []
            self._submit(early, may_wait=False)

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Take no more requests and end the background thread once all are answered.

        Args:
            block: wait for the end; outputs that are still there can be fetched after it.
            timeout: seconds to wait; the thread goes on to its end if they are over.
            keep_for_next_session: keep the engine's memory, and the manager with the model, where
                the functions that make managers find it.
            hard_stop: end what is unfinished now; it fails, with the tokens so far.

        Raises:
            RuntimeError: called from inside of a `pause` of the model.
        """
        if not self.is_running():
            logger.warning("the manager does not run; stop() changes nothing")
            return
        has_ended = self._engine.stop(
            hard_stop=hard_stop,
            timeout=timeout if block else 0.0,
            keeps_engine=keep_for_next_session,
        )
        if block and not has_ended:
            logger.warning("the manager did not end within %s s; it goes on to its end", timeout)
        if keep_for_next_session and not self.has_failed:
            self._engine.model.__dict__[_ATTRIBUTE] = _PersistentManager(self)

    def join(self, stop_trigger_time: float | None = None, timeout: float | None = None) -> None:
        """Wait for the end of the background thread, without asking for it.

        Args:
            stop_trigger_time: has no effect; transformers logs how long ago that was.
            timeout: seconds to wait; None = any time.

        Raises:
            RuntimeError: called from inside of a `pause` of the model.
        """
        if not self._engine.join(timeout):
            logger.warning("the manager did not end within %s s; it goes on to its end", timeout)

    def destroy(self) -> None:
        """Stop, if need be, and let go of everything; the manager cannot be started again."""
        if self.is_running():
            self.stop()
        self.discard()

    def discard(self) -> None:
        """Destroy without waiting; a thread that is still stopping ends by itself."""
        self._engine.destroy()
        if persistent_manager_of(self._engine.model) is self:
            del self._engine.model.__dict__[_ATTRIBUTE]

    def warmup(self) -> None:
        """Build the engine and run the model once, so that `start` is quick.

        Raises:
            UsageError: the model, or what was asked of the engine, is not supported.
        """
        self._engine.warmup()

    def pause(self) -> AbstractContextManager[None]:
        """Hold generation between two steps while a block of code runs.

        The model is given back meanwhile: it can be run, trained and its weights changed in place.
        So every manager of the model is held, and one that is started by another thread waits.
        Requests stay, and can be added and cancelled; cached prefixes are dropped. Several threads
        may hold a pause; generation goes on when the last one leaves.

        Raises:
            RuntimeError: the manager does not run.
        """
        return self._engine.pause()

    def is_running(self) -> bool:
        """Whether the background thread runs."""
        return self._engine.loop is not None

    @property
    def warmed_up(self) -> bool:
        """Whether the engine is built."""
        return self._engine.is_warm

    @property
    def is_destroyed(self) -> bool:
        """Whether the manager can never be started again."""
        return self._engine.is_destroyed

    @property
    def has_failed(self) -> bool:
        """Whether the engine has died."""
        return self._engine.failure is not None

    def raise_untold_failure(self) -> None:
        """Raise the engine's failure if no caller has heard of it yet.

        Raises:
            EngineDied: the engine has died.
        """
        failure = self._engine.failure
        if failure is not None and not self._router.is_failure_told:
            raise self._router.death(failure)

    def stats(self) -> StepStats:
        """Return counts of the engine as of its last step."""
        loop = self._engine.loop
        return StepStats() if loop is None else loop.stats()

    def reconfigure(
        self, setup: EngineSetup, settings: GenerationSettings, tokenizer: TokenDecoder | None
    ) -> None:
        """Answer requests that are added from now on with other settings.

        Raises:
            UsageError: the running engine would have to be another one.
        """
        self._engine.change_setup(setup)
        self._settings, self._tokenizer = settings, tokenizer

    def add_request(
        self,
        input_ids: TokenInput,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **sampling: Any,  # noqa: ANN401  any field of a generation config
    ) -> str:
        """Add a request; it runs as soon as there is room.

        Waits while `max_queue_size` requests wait already. A wrong value (an empty prompt, an id
        that is taken, a temperature below 0, ...) makes the request fail: its output says why.

        Args:
            input_ids: token ids of the prompt: a list, an array, a tensor, or what a tokenizer
                returns for one text (without the tokens that its attention mask hides).
            request_id: id of the request, a text; None = `req_N`.
            max_new_tokens: most tokens to generate.
            streaming: give an output after each step that gave tokens; `request_id_iter`.
            record_timestamps: note in `timestamps` when each token was there.
            eos_token_id: ids that end the answer, in place of those of the generation config.
            sampling: other fields of a generation config, for this request alone: `temperature`,
                `top_k`, `top_p`, `do_sample`, `seed`, `num_return_sequences`, ... Further samples
                of a request have the ids `ID__child#0`, `ID__child#1`, ...

        Returns:
            The id.

        Raises:
            TypeError: a keyword is unknown, the prompt is no list of integers, the id no text.
            ManagerStopped: the manager was stopped or destroyed.
            EngineDied: the engine has died.
        """
        fields = sampling | {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        check_names(fields)
        return self._add(
            [prompt_id_list(input_ids)],
            [request_id],
            [fields],
            is_streaming=streaming,
            has_timestamps=record_timestamps,
        )[0][0]

    def add_requests(
        self,
        inputs: TokenInputs,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        *,
        request_ids: Sequence[str | None] | None = None,
        generation_configs: Sequence[GenerationConfig | Mapping[str, Any] | None] | None = None,
        **sampling: Any,  # noqa: ANN401  any field of a generation config
    ) -> list[str]:
        """Add several requests together, in their order.

        Args:
            inputs: token ids of each prompt, or what a tokenizer returns for several texts.
            max_new_tokens: for each, as in `add_request`.
            streaming: as in `add_request`.
            record_timestamps: as in `add_request`.
            request_ids: an id, or None, for each of them.
            generation_configs: for each of them fields of its own, in a mapping or a
                GenerationConfig, or None; they win over the keywords, which hold for all.
            sampling: as in `add_request`.

        Returns:
            The ids, in the order of `inputs`.

        Raises:
            TypeError, ManagerStopped, EngineDied: as `add_request`.
            ValueError: `request_ids` or `generation_configs` are more or fewer than `inputs`.
            UsageError: one of `generation_configs` is no generation config.
        """
        prompts = prompt_id_lists(inputs)
        ids = _one_for_each("request_ids", request_ids, len(prompts))
        configs = _one_for_each("generation_configs", generation_configs, len(prompts))
        own = [
            generation_fields(item, f"generation_configs[{place}]")
            for place, item in enumerate(configs)
        ]
        shared = sampling | {"max_new_tokens": max_new_tokens}
        for fields in [shared, *own]:
            check_names(fields)
        added = self._add(
            prompts,
            ids,
            [shared | fields for fields in own],
            is_streaming=streaming,
            has_timestamps=record_timestamps,
        )
        return [sample_ids[0] for sample_ids in added]

    def answer(
        self, prompts: Sequence[list[int]], fields: Mapping[str, Any], *, record_timestamps: bool
    ) -> tuple[list[str], Iterator[RequestOutput]]:
        """Add requests and follow them from the start: nobody else gets their outputs.

        Args:
            prompts: token ids of each prompt.
            fields: of a generation config, for all of them, by names that are known.
            record_timestamps: as in `add_request`.

        Returns:
            The ids of all samples in order, and an iterator over the outputs as they come.

        Raises:
            ManagerStopped, EngineDied: as `add_request`.
        """
        queue, count = OutputQueue(), len(prompts)
        added = self._add(
            prompts,
            [None] * count,
            [fields] * count,
            has_timestamps=record_timestamps,
            follower=queue,
        )
        ids = [sample_id for sample_ids in added for sample_id in sample_ids]
        return ids, self._read(queue, set(ids))

    def cancel_request(self, request_id: str) -> None:
        """End a request and its further samples now; each gives a CANCELLED output.

        A request that is unknown or has ended is left alone.

        Raises:
            TypeError: the id is no text.
        """
        check_request_id(request_id)
        samples = self._router.cancel(request_id)
        with self._lock:
            if self._engine.is_new:
                for sample in [each for each in samples if each in self._before_start]:
                    self._before_start.remove(sample)
                    sample.finish(RequestStatus.CANCELLED, FinishReason.CANCELLED)
                    self._router.put([sample.output()])
                return
        loop = self._engine.loop
        if loop is not None and samples:
            loop.cancel(request_id)

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
        may_wait = timeout is not None or not self._shared_model.is_pausing()
        return self._router.take(request_id, timeout=timeout, may_wait=may_wait)

    def __iter__(self) -> Iterator[RequestOutput]:
        """Yield outputs as they come, until every request that was added is answered.

        Waits for a first request if there was none yet; ends when the manager stops.
        """
        while True:
            may_wait = not self._shared_model.is_pausing()
            output = self._router.take(ends_when_answered=True, may_wait=may_wait)
            if output is None:
                return
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
        return self._follow_in_event_loop(request_id)

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
        self._router.follow([request_id], OutputCallback(callback), also_later=True)

    def _add(
        self,
        prompts: Sequence[list[int]],
        request_ids: Sequence[str | None],
        fields: Sequence[Mapping[str, Any]],
        *,
        is_streaming: bool = False,
        has_timestamps: bool = False,
        follower: OutputQueue | None = None,
    ) -> list[list[str]]:
        """Add requests; what is wrong with one becomes its output.

        Returns:
            The ids of each request's samples, the request's own first.
        """
        for given_id in request_ids:
            if given_id is not None:
                check_request_id(given_id)
        if not self._engine.is_new and self._engine.loop is None:
            raise self._engine.refusal()
        ids: list[list[str]] = []
        ready: list[TrackedRequest] = []
        for prompt_ids, given_id, own in zip(prompts, request_ids, fields, strict=True):
            request_id = self._new_request_id() if given_id is None else given_id
            parameters, error = self._parameters(request_id, own, len(prompt_ids))
            samples = [
                TrackedRequest(
                    f"{request_id}__child#{number - 1}" if number else request_id,
                    prompt_ids,
                    params,
                    parent_id=request_id if number else None,
                    tokenizer=self._tokenizer,
                    is_streaming=is_streaming,
                    has_timestamps=has_timestamps,
                )
                for number, params in enumerate(parameters)
            ]
            if error is not None:
                samples[0].fail(error.code, error.message)
            ids.append([sample.request_id for sample in samples])
            if not self._router.expect(samples, follower):
                self._router.refuse_duplicate(samples[0])
            elif samples[0].is_finished:
                self._router.put([sample.output() for sample in samples])
            else:
                ready += samples
        with self._lock:
            if self._engine.is_new:
                self._before_start += ready
                return ids
        self._submit(ready, may_wait=not self._shared_model.is_pausing())
        return ids

    def _parameters(
        self, request_id: str, fields: Mapping[str, Any], num_prompt_tokens: int
    ) -> tuple[tuple[SamplingParams, ...], RowError | None]:
        """Return the parameters of a request's samples; of one alone, where a value is wrong."""
        try:
            settings = self._settings.resolve(request_id, set_fields(fields))
            return settings.for_prompt(num_prompt_tokens).samples, None
        except RowError as error:
            return (SamplingParams(),), error

    def _new_request_id(self) -> str:
        with self._lock:
            while True:
                name = f"req_{self._num_made_ids}"
                self._num_made_ids += 1
                if not self._router.is_known(name):
                    return name

    def _submit(self, samples: Sequence[TrackedRequest], *, may_wait: bool) -> None:
        """Hand requests to the engine, which the router expects."""
        loop = self._engine.loop
        if loop is None:
            self._router.forget(samples)
            raise self._engine.refusal()
        try:
            loop.submit(samples, may_wait=may_wait, on_refused=self._router.forget)
        except EngineError:
            refusal = self._engine.refusal(loop.failure)
            raise refusal from refusal.__cause__

    def _follow(self, request_ids: list[str]) -> Iterator[RequestOutput]:
        queue = OutputQueue()
        gone = self._router.follow(request_ids, queue)
        yield from self._read(queue, set(request_ids) - gone)

    def _read(self, queue: OutputQueue, unended: set[str]) -> Iterator[RequestOutput]:
        try:
            while unended:
                try:
                    item = queue.get(block=not self._shared_model.is_pausing())
                except Empty:
                    raise RuntimeError(WAITS_IN_A_PAUSE) from None
                output = self._router.output_of(item)
                if output is None:
                    return
                if output.is_finished():
                    unended.discard(output.request_id)
                yield output
        finally:
            self._router.unfollow(unended, queue)

    async def _follow_in_event_loop(self, request_id: str) -> AsyncIterator[RequestOutput]:
        queue = AsyncOutputQueue()
        if self._router.follow([request_id], queue):
            return
        try:
            while (output := self._router.output_of(await queue.get())) is not None:
                yield output
                if output.is_finished():
                    return
        finally:
            self._router.unfollow([request_id], queue)


def _one_for_each(name: str, given: Sequence[T | None] | None, count: int) -> list[T | None]:
    if given is None:
        return [None] * count
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise TypeError(
            f"{name} must be a list of {count}, one for each input; got {show_argument(given)}"
        )
    values = list(given)
    if len(values) != count:
        raise ValueError(f"{len(values)} {name} were given for {count} inputs; give one for each")
    return values


def _abandon(reference: weakref.ref[BackgroundEngine]) -> None:
    """End what a manager that is collected has left running.

    The collector calls this, on any thread and at any moment, so it waits for nothing, as starting
    a thread in the common way would.
    """
    engine = reference()
    loop = None if engine is None else engine.loop
    if engine is not None and loop is not None and not loop.is_stopping:
        ending = threading.Thread(target=engine.abandon, name="cbgen-abandoned", daemon=True)
        _thread.start_new_thread(ending.start, ())


class _PersistentManager:
    """Holds a manager in the attributes of its model; copies and pickles of the model have none."""

    def __init__(self, manager: ContinuousBatchingManager | None = None) -> None:
        self.manager = manager

    def __reduce__(self) -> tuple[type[_PersistentManager], tuple[()]]:
        return (_PersistentManager, ())


def persistent_manager_of(model: PreTrainedModel) -> ContinuousBatchingManager | None:
    """Return the manager that `stop(keep_for_next_session=True)` left with a model, or None."""
    kept = model.__dict__.get(_ATTRIBUTE)
    return kept.manager if isinstance(kept, _PersistentManager) else None
