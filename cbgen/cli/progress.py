"""Where a running job stands, in numbers: rates over the last seconds, rows left, time left.

Reads the job's statistics and draws nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from cbgen.engine.events import StepStats
from cbgen.io.inputs import Inputs
from cbgen.job.report.statistics import JobStatistics

_WINDOW_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One look at a job."""

    phase: str
    """As in JobStatistics."""
    elapsed: float
    """Seconds since the command began."""
    rows_done: int
    rows_failed: int
    rows_left: int | None
    """None where the input's length is not known."""
    seconds_left: float | None
    tokens_in: float
    """Prompt tokens a second, of late."""
    tokens_out: float
    """Generated tokens a second, of late."""
    engine: StepStats

    @property
    def share_done(self) -> float | None:
        """Part of the rows that is done, 0 to 1."""
        if self.rows_left is None:
            return None
        return self.rows_done / max(1, self.rows_done + self.rows_left)

    @property
    def cache_share(self) -> float:
        """Part of the cache that is used, 0 to 1."""
        return self.engine.num_used_blocks / max(1, self.engine.num_blocks)


class ProgressMeter:
    """Takes looks at a job.

    Args:
        statistics: what the job counts.
        limit: rows that the job takes at most.
    """

    def __init__(self, statistics: JobStatistics, limit: int | None = None) -> None:
        self._statistics = statistics
        self._limit = limit
        self._lines: int | None = None
        self._started = time.monotonic()
        self._history: deque[tuple[float, int, int]] = deque()

    def count_rows(self, inputs: Inputs) -> threading.Thread:
        """Count the rows of the inputs on a thread, which is returned.

        Blank lines count, so this can be too many until the job has read the files.
        """

        def count() -> None:
            self._lines = inputs.count()

        thread = threading.Thread(target=count, name="cbgen-counter", daemon=True)
        thread.start()
        return thread

    def read(self) -> Progress:
        """Take a look."""
        statistics, engine = self._statistics, self._statistics.engine
        tokens_in, tokens_out = self._rates(engine)
        left = self._rows_left()
        return Progress(
            phase=statistics.phase,
            elapsed=time.monotonic() - self._started,
            rows_done=statistics.rows_done + statistics.rows_resumed,
            rows_failed=statistics.total().rows_failed,
            rows_left=left,
            seconds_left=self._seconds_left(left),
            tokens_in=tokens_in,
            tokens_out=tokens_out,
            engine=engine,
        )

    def _rows_left(self) -> int | None:
        statistics = self._statistics
        if statistics.input_ended:
            total = statistics.rows_read
        else:
            known = [bound for bound in (self._lines, self._limit) if bound is not None]
            if not known:
                return None
            total = max(min(known), statistics.rows_read)
        return max(0, total - statistics.rows_done - statistics.rows_resumed)

    def _seconds_left(self, left: int | None) -> float | None:
        done = self._statistics.rows_done
        if left is None or done == 0:
            return None
        return left * self._statistics.run_seconds / done

    def _rates(self, engine: StepStats) -> tuple[float, float]:
        """Return tokens a second in and out over the window that ends now."""
        started = self._statistics.run_started
        if started is None:
            return 0.0, 0.0
        now, generated = time.monotonic(), engine.num_generated_tokens
        # Every generated token but a row's last one is run as well.
        prompt = engine.num_computed_tokens - engine.num_recomputed_tokens - generated
        history = self._history
        if not history:
            history.append((started, 0, 0))
        history.append((now, prompt, generated))
        while now - history[0][0] > _WINDOW_SECONDS and len(history) > 2:
            history.popleft()
        then, old_prompt, old_generated = history[0]
        seconds = now - then
        if seconds <= 0:
            return 0.0, 0.0
        return max(0, prompt - old_prompt) / seconds, (generated - old_generated) / seconds
