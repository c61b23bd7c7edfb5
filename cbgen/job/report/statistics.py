"""Counts of a running job, for displays. One thread writes each field; any may read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from cbgen.engine.events import StepStats


@dataclass(slots=True)
class RowCounts:
    """How rows ended. A row of several samples is one row with several answers."""

    rows_answered: int = 0
    rows_failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    """Answers by finish reason, each sample of a row for itself, and failed rows as `error`."""
    errors: Counter[str] = field(default_factory=Counter)
    """Failed rows by error code."""

    @property
    def rows_done(self) -> int:
        """Rows that have their output row."""
        return self.rows_answered + self.rows_failed

    @property
    def num_answers(self) -> int:
        """Answers of all rows: as many as answered rows where each has one sample."""
        return self.finish_reasons.total() - self.finish_reasons["error"]

    def count_answer(
        self, reasons: Iterable[str], *, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """Count a row that was answered; `reasons` has the finish reason of each of its samples."""
        self.rows_answered += 1
        self.finish_reasons.update(reasons)
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens

    def count_failure(self, code: str) -> None:
        """Count a row that carries an error."""
        self.rows_failed += 1
        self.finish_reasons["error"] += 1
        self.errors[code] += 1


@dataclass(slots=True)
class JobStatistics(RowCounts):
    """What has happened so far. Row counts are of the rows handed to the writer unless said."""

    phase: str = "starting"
    """starting | loading model | running | stopping | done."""
    rows_read: int = 0
    """Rows taken from the input, bad ones too."""
    input_ended: bool = False
    """Whether `rows_read` is the final count."""
    rows_resumed: int = 0
    """Rows that an earlier run had answered; in none of the other counts but `rows_read`."""
    resumed: RowCounts = field(default_factory=RowCounts)
    """How those ended."""
    rows_written: int = 0
    """Rows that the output has taken."""
    has_batch_lines: bool = False
    """Whether a row was answered as a line of a batch file."""
    engine: StepStats = field(default_factory=StepStats)
    """The engine as of its last step."""
    load_seconds: float = 0.0
    run_started: float | None = None
    """Seconds of `time.monotonic()`."""
    run_ended: float | None = None

    @property
    def run_seconds(self) -> float:
        """Seconds since the model was ready, until now or until the end."""
        if self.run_started is None:
            return 0.0
        return (self.run_ended or time.monotonic()) - self.run_started

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens of finished rows; cached and recomputed ones as the engine counts them."""
        return {
            "prompt": self.prompt_tokens,
            "cached": self.engine.num_cached_tokens,
            "completion": self.completion_tokens,
            "recomputed": self.engine.num_recomputed_tokens,
        }

    def count_resumed(
        self, reasons: Iterable[str], error_code: str | None, tokens: tuple[int, int]
    ) -> None:
        """Count a row that an earlier run had answered, with its prompt and completion tokens."""
        self.rows_resumed += 1
        if error_code is not None:
            self.resumed.count_failure(error_code)
        else:
            prompt, completion = tokens
            self.resumed.count_answer(reasons, prompt_tokens=prompt, completion_tokens=completion)

    def total(self) -> RowCounts:
        """Return the counts of this run and of the rows that an earlier one had answered."""
        return RowCounts(
            **{
                item.name: getattr(self, item.name) + getattr(self.resumed, item.name)
                for item in fields(RowCounts)
            }
        )
