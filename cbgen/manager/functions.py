"""`generate_batch` and its siblings: the functions of transformers' models, over cbgen's engine.

Each takes a loaded model first, so that `functools.partialmethod` can put it on a model class. The
other arguments are those of transformers; `tokenizer` and `logprobs_mode` are cbgen's own.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers
from transformers import PreTrainedModel

from cbgen.engine.config import WorkloadHints
from cbgen.engine.text import TokenDecoder
from cbgen.errors import RowError, UsageError
from cbgen.generation.check import FieldError, run_seed
from cbgen.generation.fields import GENERATION_SECTION
from cbgen.generation.resolve import LogprobsMode
from cbgen.manager.configs import (
    BatchingConfig,
    GivenGeneration,
    check_model,
    check_names,
    engine_setup,
    generation_settings,
    set_fields,
    setting,
)
from cbgen.manager.given_requests import TokenInputs, prompt_id_lists
from cbgen.manager.manager import ContinuousBatchingManager, persistent_manager_of
from cbgen.manager.outputs import EngineDied, RequestOutput
from cbgen.values import show_argument

_SEED_BITS = 32


def init_continuous_batching(
    model: PreTrainedModel,
    generation_config: GivenGeneration | None = None,
    continuous_batching_config: BatchingConfig | None = None,
    workload_hints: object | None = None,
    *,
    tokenizer: TokenDecoder | None = None,
    logprobs_mode: LogprobsMode = "raw",
) -> ContinuousBatchingManager:
    """Return a manager for a model; `start` it before it answers.

    A manager that was kept with the model (`keep_for_next_session`, `persistent_manager`) is
    returned again, with the settings given now; its engine is built anew if they need another one.

    Args:
        model: a loaded causal language model. It is hooked between `start` and `stop`, and
            restored then.
        generation_config: sampling and stopping of requests that say nothing else, an object or a
            mapping of its fields; None = the model's own. Not changed.
        continuous_batching_config: settings of the engine: cbgen's class, transformers' or a
            mapping.
        workload_hints: WorkloadHints, cbgen's or transformers'.
        tokenizer: for `text_delta` of streamed outputs, and for `stop_strings`.
        logprobs_mode: which log-probabilities `return_logprobs` gives: of the model's own
            distribution, or after temperature and filters.

    Raises:
        UsageError: a field is unknown, out of range or not supported; the text names it.
    """
    check_model(model)
    if logprobs_mode not in get_args(LogprobsMode):
        raise UsageError(f"logprobs_mode must be raw or processed, got {logprobs_mode!r}")
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise UsageError(
            f"the tokenizer must be a loaded one, got {show_argument(tokenizer)}; load it with "
            "AutoTokenizer.from_pretrained"
        )
    setup = engine_setup(model, continuous_batching_config, generation_config, workload_hints)
    config = setup.config
    try:
        seed = run_seed(setting(generation_config, "seed"), config.seed)
    except FieldError as error:
        raise UsageError(f"{GENERATION_SECTION}.{error}") from error
    settings = generation_settings(
        model,
        generation_config,
        run_seed=secrets.randbits(_SEED_BITS) if seed is None else seed,
        logprobs=logprobs_mode if config.return_logprobs else None,
        tokenizer=tokenizer,
    )
    kept = persistent_manager_of(model)
    if kept is not None:
        kept.reconfigure(setup, settings, tokenizer)
        return kept
    return ContinuousBatchingManager(model, setup, settings, tokenizer)


@contextmanager
def continuous_batching_context_manager(  # noqa: PLR0913  as in transformers
    model: PreTrainedModel,
    generation_config: GivenGeneration | None = None,
    block: bool = True,
    timeout: float | None = None,
    continuous_batching_config: BatchingConfig | None = None,
    persistent_manager: bool = False,
    warmup: bool = True,
    workload_hints: object | None = None,
    *,
    tokenizer: TokenDecoder | None = None,
    logprobs_mode: LogprobsMode = "raw",
) -> Iterator[ContinuousBatchingManager]:
    """Run a manager for a block of code; on exit it answers what was added and stops.

    If the block raises, unfinished requests are ended at once.

    Args:
        model: as in `init_continuous_batching`; so are the arguments not named here.
        generation_config: see there.
        block: wait on exit until the manager has stopped.
        timeout: seconds to wait there; None = as long as it takes.
        continuous_batching_config: see there.
        persistent_manager: keep the manager, with its memory, for the next call with this model.
        warmup: has no effect: the engine is always built before the block begins.
        workload_hints: see there.
        tokenizer: see there.
        logprobs_mode: see there.

    Raises:
        UsageError: a setting, or the model, is not supported.
        EngineDied: on exit, if the engine died while requests were unanswered and nobody was told.
    """
    manager = init_continuous_batching(
        model,
        generation_config,
        continuous_batching_config,
        workload_hints,
        tokenizer=tokenizer,
        logprobs_mode=logprobs_mode,
    )
    if manager.is_running():  # it was kept and started again: whoever did that will stop it
        yield manager
        return
    manager.start()
    try:
        yield manager
        if manager.is_running():
            manager.stop(block=block, timeout=timeout, keep_for_next_session=persistent_manager)
    except BaseException:  # also on Ctrl-C during the stop
        if manager.is_running():
            manager.stop(hard_stop=True)
        manager.discard()
        raise
    if manager.has_failed or not persistent_manager:
        manager.discard()
    manager.raise_untold_failure()


def generate_batch(  # noqa: PLR0913  as in transformers
    model: PreTrainedModel,
    inputs: TokenInputs,
    generation_config: GivenGeneration | None = None,
    continuous_batching_config: BatchingConfig | None = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    *,
    tokenizer: TokenDecoder | None = None,
    logprobs_mode: LogprobsMode = "raw",
    **sampling: Any,  # noqa: ANN401  any field of a generation config
) -> dict[str, RequestOutput]:
    """Answer prompts and return the outputs by id, in the order of the prompts.

    Ids are `req_0`, `req_1`, ...; further samples of a request (`num_return_sequences`) have the
    ids `req_0__child#0`, ... and follow it.

    Args:
        model: as in `init_continuous_batching`; so are the arguments not named here.
        inputs: token ids of each prompt: lists, arrays or tensors, the rows of one, or what a
            tokenizer returns for several texts (without the tokens that its attention mask hides).
        generation_config: see there.
        continuous_batching_config: see there.
        record_timestamps: note in `timestamps` when each token was there.
        progress_bar: show one on stderr.
        persistent_manager: keep the manager, with its memory, for the next call with this model.
        warmup: has no effect: the engine is always built first.
        tokenizer: see there.
        logprobs_mode: see there.
        sampling: fields of a generation config that win over it: `max_new_tokens`, `temperature`...

    Returns:
        An output for every request. One that failed by itself has status FAILED and `error`.

    Raises:
        UsageError: a setting, or the model, is not supported; settings contradict one another.
        TypeError: a keyword is unknown, or a prompt is no list of integers.
        EngineDied: the engine died; `outputs` of the exception has what was finished.
    """
    check_model(model)
    prompts = prompt_id_lists(inputs)
    settings = generation_settings(model, generation_config)
    check_names(sampling)
    try:
        settings.resolve("", set_fields(sampling))
    except RowError as error:
        raise UsageError(f"generate_batch: {error.__cause__ or error}") from error
    if not prompts:
        return {}
    shared = model.generation_config if generation_config is None else generation_config
    hints = _hints(prompts, shared, sampling)
    with continuous_batching_context_manager(
        model,
        generation_config,
        continuous_batching_config=continuous_batching_config,
        persistent_manager=persistent_manager,
        workload_hints=None if persistent_manager else hints,
        tokenizer=tokenizer,
        logprobs_mode=logprobs_mode,
    ) as manager:
        ids, answers = manager.answer(prompts, sampling, record_timestamps=record_timestamps)
        outputs: Iterable[RequestOutput] = answers
        if progress_bar:
            outputs = tqdm(outputs, total=len(ids), unit="request")
        results: dict[str, RequestOutput] = {}
        try:
            for output in outputs:
                results[output.request_id] = output
        except EngineDied as error:
            error.outputs = results | error.outputs
            raise
        return {request_id: results[request_id] for request_id in ids}


def destroy_cached_continuous_batching_manager(model: PreTrainedModel) -> None:
    """Destroy the manager that is kept with a model, if there is one."""
    kept = persistent_manager_of(model)
    if kept is not None:
        kept.destroy()


def _hints(
    prompts: Sequence[list[int]], config: GivenGeneration | None, sampling: Mapping[str, Any]
) -> WorkloadHints:
    def number(name: str) -> int:
        return sampling.get(name) or setting(config, name) or 0

    return WorkloadHints(
        max_prompt_length=max(map(len, prompts)),
        max_generated_length=number("max_new_tokens"),
        num_requests=len(prompts) * max(1, number("num_return_sequences")),
    )
