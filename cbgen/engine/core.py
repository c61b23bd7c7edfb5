"""The engine: `schedule`, `launch`, `update` make a step; nothing else does."""

from __future__ import annotations

from time import perf_counter
from typing import Protocol

from cbgen.engine.events import EngineObserver, StepStats, StepTimes
from cbgen.engine.request import GenerationOutput, Request
from cbgen.engine.scheduler.scheduler import Scheduler
from cbgen.engine.step import ScheduledBatch, StepResult


class StepHandle(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for the step and return what was drawn."""


class StepRunner(Protocol):
    """Runs batches: the runner, or a test's stand-in."""

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        """Start one step without waiting for it."""


class Engine:
    """Continuous batching over a scheduler and a runner. Not thread-safe: one thread calls it.

    Args:
        scheduler: decides.
        runner: runs what was decided.
        check: verify the scheduler's bookkeeping after every step.
        observer: is told how long each step took.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        *,
        check: bool = False,
        observer: EngineObserver | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._check = check
        self._observer = observer

    def add(self, request: Request) -> None:
        """Take a request; one that can never run comes back failed from the next `step`."""
        self._scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        """End a request now with what it has; unknown and finished ids are ignored."""
        self._scheduler.cancel(request_id)

    def reset_prefix_cache(self) -> None:
        """Share nothing any more that was computed so far, because the weights have changed."""
        self._scheduler.reset_prefix_cache()

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return self._scheduler.has_unfinished()

    def unfinished(self) -> list[Request]:
        """Return all requests that wait or run."""
        return self._scheduler.unfinished()

    def step(self) -> list[GenerationOutput]:
        """Run one step and return the requests that ended, in the order in which they ended."""
        scheduler, observer = self._scheduler, self._observer
        if scheduler.has_unfinished():
            started = perf_counter()
            batch = scheduler.schedule()
            scheduled = perf_counter()
            result = self._runner.launch(batch).result()
            executed = perf_counter()
            scheduler.update(batch, result)
            if observer is not None:
                updated, stats = perf_counter(), scheduler.stats()
                observer.stepped(
                    StepTimes(
                        step=batch.step,
                        started=started,
                        scheduled=scheduled,
                        executed=executed,
                        updated=updated,
                        num_tokens=batch.num_tokens,
                        num_requests=len(batch.requests),
                        num_waiting=stats.num_waiting,
                        num_used_blocks=stats.num_used_blocks,
                    )
                )
            if self._check:
                scheduler.check()
        return self.take_outputs()

    def take_outputs(self) -> list[GenerationOutput]:
        """Return the requests that ended since they were last asked for, without running a step."""
        return [request.output() for request in self._scheduler.take_finished()]

    def stats(self) -> StepStats:
        """Return counts as of now."""
        return self._scheduler.stats()
