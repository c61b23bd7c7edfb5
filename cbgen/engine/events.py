"""What the engine tells about itself; read by displays and statistics, never by the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepStats:
    """A snapshot between two steps. Counts of tokens and preemptions are totals since the start."""

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
