"""Counts of a running job, for displays. One thread writes each field; any may read."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from cbgen.engine.events import StepStats


@dataclass(slots=True)
class JobStatistics:
    """What has happened so far. Row counts are of the rows handed to the writer unless said."""

    phase: str = "starting"
    """starting | loading model | running | done."""
    rows_read: int = 0
    """Rows taken from the input, bad ones too."""
    input_ended: bool = False
    """Whether `rows_read` is the final count."""
    rows_answered: int = 0
    rows_failed: int = 0
    rows_written: int = 0
    """Rows that the output has taken."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    """Failed rows by error code."""
    engine: StepStats = field(default_factory=StepStats)
    """The engine as of its last step."""
    load_seconds: float = 0.0
    run_started: float | None = None
    """Seconds of `time.monotonic()`."""
    run_ended: float | None = None

    @property
    def rows_done(self) -> int:
        """Rows that have their output row."""
        return self.rows_answered + self.rows_failed

    @property
    def run_seconds(self) -> float:
        """Seconds since the model was ready, until now or until the end."""
        if self.run_started is None:
            return 0.0
        return (self.run_ended or time.monotonic()) - self.run_started

    def count_answer(self, reason: str, prompt_tokens: int, completion_tokens: int) -> None:
        """Count a row that was answered."""
        self.rows_answered += 1
        self.finish_reasons[reason] += 1
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens

    def count_failure(self, code: str) -> None:
        """Count a row that carries an error."""
        self.rows_failed += 1
        self.finish_reasons["error"] += 1
        self.errors[code] += 1
