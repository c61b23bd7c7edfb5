"""One model, one engine, one job: put together, started, and ended again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cbgen.engine.build import build_engine
from cbgen.engine.events import EngineObserver
from cbgen.engine.loop import EngineLoop
from cbgen.engine.model.attach import attached
from cbgen.engine.model.loader import LoadedModel, load_model
from cbgen.engine.plan import EnginePlan
from cbgen.io.openai.responses import BatchLines
from cbgen.io.rows import ROW_OPTIONS, OutputRows
from cbgen.io.template import Template
from cbgen.job.answers import AnswerBuilder
from cbgen.job.batch_job import BatchJob, Results
from cbgen.job.channel import Channel
from cbgen.job.preparer import Preparer, make_preparer
from cbgen.job.report.statistics import JobStatistics
from cbgen.job.settings import Setting, effective_settings
from cbgen.recipe.schema import Recipe

_READ_AHEAD = 64
"""Rows in flight beyond those that the engine can run at once."""


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A job that is ready to answer records, and what was decided for it."""

    job: BatchJob
    preparer: Preparer
    plan: EnginePlan
    settings: list[Setting]


@contextmanager
def open_job(
    recipe: Recipe,
    template: Template | None,
    statistics: JobStatistics,
    observer: EngineObserver | None = None,
    loaded: LoadedModel | None = None,
) -> Iterator[OpenJob]:
    """Load the model and run the engine's thread; on exit both end, unfinished rows cancelled.

    Args:
        recipe: the checked recipe.
        template: its compiled `prompt.template`.
        statistics: kept up to date.
        observer: is told what the engine does.
        loaded: the recipe's model, if it is loaded already; the caller keeps it.

    Raises:
        UsageError: model or settings are wrong.
    """
    statistics.phase = "loading model"
    started = time.monotonic()
    if loaded is None:
        loaded = load_model(recipe.model)
    with attached(loaded.model):
        built = build_engine(
            loaded.model,
            recipe.continuous_batching_config,
            recipe.model.attn_implementation,
            observer=observer,
        )
        preparer = make_preparer(recipe, template, loaded, built.plan)
        results: Results = Channel()
        loop = EngineLoop(
            built.engine, results, max_queue_size=recipe.continuous_batching_config.max_queue_size
        )
        job = BatchJob(
            preparer=preparer,
            answers=_answers(recipe, loaded),
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
            yield OpenJob(
                job,
                preparer,
                built.plan,
                effective_settings(recipe, loaded, built.facts, built.plan, preparer),
            )
        finally:
            statistics.engine = loop.stats()
            statistics.run_ended = time.monotonic()
            statistics.phase = "done"
            loop.stop(hard_stop=True)


def _answers(recipe: Recipe, loaded: LoadedModel) -> AnswerBuilder:
    options = {name for name in ROW_OPTIONS if getattr(recipe.output, name)}
    if loaded.tokenizer is None:
        options.add("token_ids")
    return AnswerBuilder(
        loaded.tokenizer,
        rows=OutputRows(recipe.output.columns, options=options),
        lines=BatchLines(
            seed=recipe.seed or 0, model=recipe.model.path, token_ids="token_ids" in options
        ),
    )
