"""The engine: three verbs a step, and nothing else."""

from __future__ import annotations

from typing import Protocol

from cbgen.engine.events import StepStats
from cbgen.engine.request import GenerationOutput, Request
from cbgen.engine.scheduler.base import Scheduler
from cbgen.engine.step import ScheduledBatch, StepResult


class StepRunner(Protocol):
    """Whoever can run a batch: the runner, or a test's stand-in."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run one step."""


class Engine:
    """Continuous batching over a scheduler and a runner. Not thread-safe: one thread calls it."""

    def __init__(self, scheduler: Scheduler, runner: StepRunner, *, check: bool = False) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._check = check

    def add(self, request: Request) -> None:
        """Take a request; one that can never run comes back failed from the next `step`."""
        self._scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        """End a request now with what it has; unknown and finished ids are ignored."""
        self._scheduler.cancel(request_id)

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return self._scheduler.has_unfinished()

    def unfinished(self) -> list[Request]:
        """Return all requests that wait or run."""
        return list(self._scheduler.unfinished())

    def step(self) -> list[GenerationOutput]:
        """Run one step and return the requests that ended, in the order in which they ended."""
        if self._scheduler.has_unfinished():
            batch = self._scheduler.schedule()
            result = self._runner.execute(batch)
            self._scheduler.update(batch, result)
            if self._check:
                self._scheduler.check()
        return [request.output() for request in self._scheduler.take_finished()]

    def stats(self) -> StepStats:
        """Return counts as of now."""
        return self._scheduler.stats()
