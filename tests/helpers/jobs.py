"""A job around an engine that answers at once: everything but the model is real."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cbgen.engine.events import StepStats
from cbgen.engine.request import FinishReason, Request, RequestStatus
from cbgen.generation.resolve import GenerationSettings
from cbgen.io.openai.responses import BatchLines
from cbgen.io.records import Record, record_of
from cbgen.io.rows import OutputRows
from cbgen.job.answers import AnswerBuilder
from cbgen.job.batch_job import BatchJob, Results
from cbgen.job.channel import Channel
from cbgen.job.preparer import Preparer
from cbgen.job.rendering import Renderer
from cbgen.job.report.statistics import JobStatistics
from cbgen.recipe.schema import PromptConfig
from tests.helpers.engine import make_plan

EOS = 2


@dataclass
class StubEngine:
    """Ends each request at once with its prompt's first token and the end of sequence."""

    results: Results
    submitted: list[str] = field(default_factory=list)
    keeps_ids: bool = True
    holds: Callable[[Request], bool] = lambda request: False
    held: list[Request] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    deadlines: list[float] = field(default_factory=list)

    def submit(self, requests: Sequence[Request]) -> None:
        if self.keeps_ids:
            self.submitted.extend(request.request_id for request in requests)
        now = [request for request in requests if not self.holds(request)]
        held = [request for request in requests if self.holds(request)]
        self.held.extend(held)
        self.finish(now)
        if self.deadlines:  # as the engine does with what comes after a wish to end
            for request in held:
                self.cancel(request.request_id)

    def finish(self, requests: Iterable[Request]) -> None:
        outputs = []
        for request in requests:
            request.generated_tokens = [request.prompt_ids[0], EOS]
            request.finish(RequestStatus.FINISHED, FinishReason.STOP)
            outputs.append(request.output())
        self.results.put(outputs)

    def fail(self, request: Request) -> None:
        request.fail("non_finite_logits", "the model gave logits that are not finite numbers")
        self.results.put([request.output()])

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        for request in self.held:
            if request.request_id == request_id and not request.is_finished:
                request.finish(RequestStatus.CANCELLED, FinishReason.CANCELLED)
                self.results.put([request.output()])

    def wind_down(self, deadline: float) -> None:
        self.deadlines.append(deadline)
        for request in self.held:
            self.cancel(request.request_id)

    def stats(self) -> StepStats:
        return StepStats()


@dataclass
class StubJob:
    """A job, and the parts that tests look at."""

    job: BatchJob
    preparer: Preparer
    engine: StubEngine
    statistics: JobStatistics


def make_stub_job(
    *,
    max_in_flight: int = 128,
    keeps_ids: bool = True,
    generation: dict[str, Any] | None = None,
    shares_prefixes: bool = False,
) -> StubJob:
    """Return a job for prompts of token ids, whose engine answers at once."""
    results: Results = Channel()
    engine = StubEngine(results, keeps_ids=keeps_ids)
    statistics = JobStatistics()
    preparer = Preparer(
        renderer=Renderer(None, PromptConfig()),
        generation=GenerationSettings(
            model={},
            recipe=generation or {},
            eos_token_ids=frozenset({EOS}),
            run_seed=0,
            logprobs=None,
        ),
        template=None,
        plan=make_plan(max_context=100, shares_prefixes=shares_prefixes),
    )
    job = BatchJob(
        preparer=preparer,
        answers=AnswerBuilder(
            None,
            rows=OutputRows("none", options={"token_ids"}),
            lines=BatchLines(seed=0, model="", token_ids=True),
        ),
        engine=engine,
        results=results,
        statistics=statistics,
        max_in_flight=max_in_flight,
    )
    return StubJob(job, preparer, engine, statistics)


def records_of(rows: Iterable[dict[str, Any]]) -> Iterator[Record]:
    """Yield the records of rows given as dictionaries."""
    return (record_of(row, index=index, source="rows") for index, row in enumerate(rows))


def token_rows(count: int) -> list[dict[str, Any]]:
    """Return rows whose prompts are token ids."""
    return [{"prompt_token_ids": [10 + index % 50]} for index in range(count)]


def job_threads() -> list[str]:
    """Return the names of the job's threads that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("cbgen-")]
