"""What the engine tells about itself; read by displays and statistics, never by the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(slots=True)
class StepStats:
    """Counts as of a moment between two steps; those of the past are totals since the start."""

    num_steps: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    peak_used_blocks: int = 0
    num_computed_tokens: int = 0
    """Tokens run through the model, recomputed ones included."""
    num_generated_tokens: int = 0
    num_recomputed_tokens: int = 0
    """Tokens run again because their request had been preempted."""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the cache instead of being computed."""
    num_evictions: int = 0
    """Cached blocks that were dropped to make room."""
    num_offloaded_blocks: int = 0
    """Blocks that were moved to host memory."""


class StepTimes(NamedTuple):
    """One step. Times are seconds of `time.perf_counter()`."""

    step: int
    started: float
    scheduled: float
    executed: float
    updated: float
    num_tokens: int
    """Tokens of the forward pass."""
    num_requests: int
    """Requests that ran in it."""
    num_waiting: int
    num_used_blocks: int


class EngineObserver(Protocol):
    """Is told what happens to rows within steps; called on the engine's thread.

    A row is a request's place from admission to its end or preemption. No method may block or
    raise. Without an observer nothing of this is computed.
    """

    def admitted(self, row: int, request_id: str, num_tokens: int) -> None:
        """A request took a row, with so many known tokens to compute."""

    def decoding(self, row: int) -> None:
        """The first token since the admission was drawn."""

    def preempted(self, row: int, num_computed_tokens: int) -> None:
        """The request lost its row and what was computed."""

    def ended(self, row: int, reason: str, num_generated_tokens: int) -> None:
        """The request is finished, failed or cancelled."""

    def stepped(self, times: StepTimes) -> None:
        """A step has ended; what it did to rows was told before."""
