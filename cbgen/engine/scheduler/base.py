"""What the engine asks of a scheduler. Schedulers are pure Python: no tensors, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from cbgen.engine.events import StepStats
from cbgen.engine.request import Request
from cbgen.engine.step import ScheduledBatch, StepResult
from cbgen.engine.text.detokenizer import Decoder


class Scheduler(Protocol):
    """Decides what each step runs and takes what came of it."""

    tokenizer: Decoder | None
    """Decodes the answers of requests with stop strings; without it such requests fail."""

    def add(self, request: Request) -> None:
        """Take a request, or fail it at once if it can never run; `take_finished` then has it."""

    def cancel(self, request_id: str) -> None:
        """End a request and its other samples now; unknown and finished ids are ignored."""

    def reset_prefix_cache(self) -> None:
        """Forget what was computed for other requests, because the weights have changed."""

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""

    def schedule(self) -> ScheduledBatch:
        """Decide one step; never empty while a request is unfinished."""

    def update(self, batch: ScheduledBatch, result: StepResult) -> None:
        """Append what was sampled; end requests that reached a stop token or their limit."""

    def take_finished(self) -> list[Request]:
        """Return the requests that ended since the last call, in the order in which they ended."""

    def unfinished(self) -> Iterable[Request]:
        """Return all requests that wait or run."""

    def stats(self) -> StepStats:
        """Return counts as of now."""

    def check(self) -> None:
        """Recompute all bookkeeping from scratch.

        Raises:
            AssertionError: something disagrees.
        """
