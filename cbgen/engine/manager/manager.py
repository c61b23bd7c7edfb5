"""The public manager: requests in from any thread, outputs out to whoever waits for them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from transformers import PreTrainedModel

from cbgen.engine.events import StepStats
from cbgen.engine.manager.intake import Intake
from cbgen.engine.manager.lifecycle import Lifecycle
from cbgen.engine.manager.requests import RequestForm, RequestSettings, token_list
from cbgen.engine.manager.results import ResultReader
from cbgen.engine.manager.router import OutputRouter
from cbgen.engine.manager.setup import EngineSetup
from cbgen.engine.text.detokenizer import Decoder

logger = logging.getLogger(__name__)

_KEPT_NAME = "_cbgen_manager"


class ContinuousBatchingManager(ResultReader):
    """Answers requests of many threads with one model, in the background.

    Made by `cbgen.init_continuous_batching` and `cbgen.continuous_batching_context_manager`. All
    methods are thread-safe. Between `start` and the end of `stop` the model is borrowed: its
    attention goes to the engine and it is in evaluation mode; otherwise it is as it was.

    Every request ends in exactly one output with a final status, also one that is wrong
    (FAILED, `error` says why), cancelled (CANCELLED, with the tokens so far) or cut short by a hard
    stop (FAILED, with the tokens so far).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        setup: EngineSetup,
        settings: RequestSettings,
        tokenizer: Decoder | None = None,
    ) -> None:
        router = OutputRouter()
        super().__init__(router)
        self._lifecycle = Lifecycle(model, setup, router)
        self._intake = Intake(self._lifecycle, router, settings, tokenizer)

    def start(self) -> None:
        """Start the background thread; requests that were added before begin to run.

        Raises:
            UsageError: the model, or what was asked of the engine, is not supported.
            RuntimeError: the manager was destroyed, or is still stopping.
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
            RuntimeError: called from inside of this manager's `pause`.
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

    def pause(self) -> AbstractContextManager[None]:
        """Hold generation between two steps while a block of code runs.

        The model is given back meanwhile: it can be run, trained and its weights changed in place.
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
        if failure is not None and not self._router.is_failure_told():
            raise self._router.death(failure)

    def is_running(self) -> bool:
        """Whether the background thread runs."""
        return self._lifecycle.session is not None

    def stats(self) -> StepStats:
        """Return counts of the engine as of its last step."""
        return self._lifecycle.stats()

    def reconfigure(
        self, setup: EngineSetup, settings: RequestSettings, tokenizer: Decoder | None
    ) -> None:
        """Answer requests that are added from now on with other settings.

        Raises:
            UsageError: the running engine would have to be another one.
        """
        self._lifecycle.change_setup(setup)
        self._intake.change_settings(settings, tokenizer)

    def add_request(
        self,
        input_ids: Iterable[int],
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
            input_ids: token ids of the prompt: a list, or an array or tensor of one dimension.
            request_id: id of the request; None = `req_N`.
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
            TypeError: a keyword is unknown, or the prompt is no list of integers.
            ManagerStopped: the manager was stopped or destroyed.
            EngineDied: the engine has died.
        """
        fields = sampling | {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        self._intake.check_names(fields)
        form = RequestForm(streaming=streaming, record_timestamps=record_timestamps, fields=fields)
        return self.add([(request_id, token_list(input_ids), form)])[0][0]

    def add_requests(
        self,
        inputs: Sequence[Iterable[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        *,
        request_ids: Sequence[str | None] | None = None,
        generation_configs: Sequence[Mapping[str, Any] | None] | None = None,
        **sampling: Any,  # noqa: ANN401  any field of a generation config
    ) -> list[str]:
        """Add several requests together, in their order.

        Args:
            inputs: token ids of each prompt.
            max_new_tokens: for each, as in `add_request`.
            streaming: as in `add_request`.
            record_timestamps: as in `add_request`.
            request_ids: an id, or None, for each of them.
            generation_configs: for each of them fields of its own, or None; they win over the
                keywords, which hold for all.
            sampling: as in `add_request`.

        Returns:
            The ids, in the order of `inputs`.

        Raises:
            TypeError, ManagerStopped, EngineDied: as `add_request`.
            ValueError: `request_ids` or `generation_configs` are more or fewer than `inputs`.
        """
        shared = sampling | {"max_new_tokens": max_new_tokens}
        own = [dict(item or {}) for item in generation_configs or [{}] * len(inputs)]
        ids = list(request_ids or [None] * len(inputs))
        for name, given in (("request_ids", ids), ("generation_configs", own)):
            if len(given) != len(inputs):
                raise ValueError(f"{len(given)} {name} were given for {len(inputs)} inputs")
        for fields in [shared, *own]:
            self._intake.check_names(fields)
        prompts = [token_list(input_ids) for input_ids in inputs]
        forms = [
            RequestForm(
                streaming=streaming, record_timestamps=record_timestamps, fields=shared | fields
            )
            for fields in own
        ]
        samples = self.add(list(zip(ids, prompts, forms, strict=True)))
        return [sample_ids[0] for sample_ids in samples]

    def add(
        self, given: Sequence[tuple[str | None, list[int], RequestForm]]
    ) -> list[tuple[str, ...]]:
        """Add requests, each an id or None, a prompt and the rest; names of fields are known.

        Returns:
            The ids of each request's samples, the request's own first.

        Raises:
            ManagerStopped, EngineDied: as `add_request`.
        """
        return self._intake.add(given)

    def cancel_request(self, request_id: str) -> None:
        """End a request and its further samples now; each gives a CANCELLED output.

        A request that is unknown or has ended is left alone.
        """
        self._intake.cancel(request_id)


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
