"""One model, one engine, one job: put together, started, and ended again."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cbgen.engine.build import attached_engine
from cbgen.engine.manager.loop import EngineLoop
from cbgen.engine.model.load import load_model
from cbgen.io.rows import OutputRows
from cbgen.io.template import Template
from cbgen.job.answers import AnswerBuilder
from cbgen.job.batch import BatchJob, Results
from cbgen.job.generation import GenerationSettings
from cbgen.job.prepare import Preparer
from cbgen.job.rendering import Renderer
from cbgen.job.settings import Setting, effective_settings
from cbgen.job.statistics import JobStatistics
from cbgen.recipe.schema import Recipe

logger = logging.getLogger(__name__)

_READ_AHEAD = 64
"""Rows in flight beyond those that the engine can run at once."""


@dataclass(frozen=True, slots=True)
class Session:
    """A job that is ready to answer records."""

    job: BatchJob
    settings: list[Setting]
    """What holds for the run."""


def compile_template(recipe: Recipe) -> Template | None:
    """Return the compiled `prompt.template`, None where there is none.

    Raises:
        UsageError: the template is wrong.
    """
    return None if recipe.prompt.template is None else Template(recipe.prompt.template)


def _tell_renamed(name: str, output_name: str) -> None:
    logger.warning(
        "input column %r is written as %r: output rows have a field of that name", name, output_name
    )


@contextmanager
def open_session(
    recipe: Recipe, template: Template | None, statistics: JobStatistics
) -> Iterator[Session]:
    """Load the model and run the engine's thread; on exit both end, unfinished rows cancelled.

    Raises:
        UsageError: model or settings are wrong.
    """
    statistics.phase = "loading model"
    started = time.monotonic()
    loaded = load_model(recipe.model)
    with attached_engine(
        loaded.model, recipe.continuous_batching, recipe.model.attn_implementation
    ) as built:
        renderer = Renderer(loaded.tokenizer, recipe.prompt)
        generation = GenerationSettings(
            model=loaded.generation_defaults if recipe.generation_defaults == "model" else {},
            recipe=recipe.generation,
            eos_token_ids=loaded.eos_token_ids,
            run_seed=recipe.seed or 0,
            logprobs=recipe.output.logprobs_mode
            if recipe.continuous_batching.return_logprobs
            else None,
        )
        results = Results()
        loop = EngineLoop(built.engine, results)
        job = BatchJob(
            preparer=Preparer(
                renderer=renderer,
                settings=generation,
                template=template,
                max_context=min(built.plan.max_context, built.plan.cache_tokens),
                max_prompt=recipe.prompt.max_length,
                truncates=recipe.prompt.truncation != "error",
            ),
            answers=AnswerBuilder(
                loaded.tokenizer,
                OutputRows(recipe.output.columns, on_renamed=_tell_renamed),
                token_ids=recipe.output.token_ids,
            ),
            engine=loop,
            results=results,
            statistics=statistics,
            max_in_flight=built.plan.max_requests + _READ_AHEAD,
        )
        loop.start()
        statistics.run_started = time.monotonic()
        statistics.load_seconds = statistics.run_started - started
        statistics.phase = "running"
        try:
            yield Session(job, effective_settings(recipe, built, generation, renderer))
        finally:
            statistics.engine = loop.stats()
            statistics.run_ended = time.monotonic()
            statistics.phase = "done"
            loop.stop(hard_stop=True)
