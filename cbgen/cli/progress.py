"""How far a running job is: measured from its statistics, and shown while it runs.

A terminal gets a live block, anything else a plain line every ten seconds. Both are drawn on a
thread of their own, so the job never waits for them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cbgen.cli.console import Console, clock, count, percent, rate
from cbgen.engine.events import StepStats
from cbgen.io.inputs import Inputs
from cbgen.job.report.statistics import JobStatistics

LOG_SECONDS = 10.0
"""Seconds between two plain lines."""
_REFRESHES_PER_SECOND = 4
_RATE_SECONDS = 10.0
"""Rates are averages over this many last seconds."""
_BAR_WIDTH = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a job at one moment."""

    phase: str
    """As in `JobStatistics`."""
    elapsed: float
    """Seconds since the command began."""
    rows_done: int
    rows_failed: int
    rows_left: int | None
    """None if the input's length is not known."""
    seconds_left: float | None
    tokens_in: float
    """Prompt tokens per second, over the last seconds."""
    tokens_out: float
    """Generated tokens per second, over the last seconds."""
    engine: StepStats

    @property
    def share_done(self) -> float | None:
        """Part of the rows that is done, 0 to 1."""
        if self.rows_left is None:
            return None
        return self.rows_done / max(1, self.rows_done + self.rows_left)


class ProgressMeter:
    """Measures the progress of a job.

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
        """Count the rows of the inputs on a thread, and return the thread.

        Blank lines are counted too, so the number may be too high until the job has read the files.
        """

        def count_lines() -> None:
            self._lines = inputs.count()

        thread = threading.Thread(target=count_lines, name="cbgen-counter", daemon=True)
        thread.start()
        return thread

    def read(self) -> Progress:
        """Return the progress of now."""
        statistics, engine = self._statistics, self._statistics.engine
        tokens_in, tokens_out = self._rates(engine)
        left, done = self._rows_left(), statistics.rows_done
        return Progress(
            phase=statistics.phase,
            elapsed=time.monotonic() - self._started,
            rows_done=done + statistics.rows_resumed,
            rows_failed=statistics.total().rows_failed,
            rows_left=left,
            seconds_left=None if left is None or not done else left * statistics.run_seconds / done,
            tokens_in=tokens_in,
            tokens_out=tokens_out,
            engine=engine,
        )

    def _rows_left(self) -> int | None:
        statistics = self._statistics
        known = [bound for bound in (self._lines, self._limit) if bound is not None]
        if statistics.input_ended:
            total = statistics.rows_read
        elif known:
            total = max(min(known), statistics.rows_read)
        else:
            return None
        return max(0, total - statistics.rows_done - statistics.rows_resumed)

    def _rates(self, engine: StepStats) -> tuple[float, float]:
        """Return prompt and generated tokens per second over the last seconds."""
        started = self._statistics.run_started
        if started is None:
            return 0.0, 0.0
        now, generated = time.monotonic(), engine.num_generated_tokens
        # The model runs every generated token as well, except the last one of a row.
        prompt = engine.num_computed_tokens - engine.num_recomputed_tokens - generated
        history = self._history
        if not history:
            history.append((started, 0, 0))
        history.append((now, prompt, generated))
        while now - history[0][0] > _RATE_SECONDS and len(history) > 2:
            history.popleft()
        then, old_prompt, old_generated = history[0]
        seconds = now - then
        if seconds <= 0:
            return 0.0, 0.0
        return max(0, prompt - old_prompt) / seconds, (generated - old_generated) / seconds


def job_display(
    console: Console, meter: ProgressMeter, *, redraws: bool
) -> AbstractContextManager[object]:
    """Show a job while the context is open.

    Args:
        console: where it is shown; a quiet one shows nothing.
        meter: measures the job.
        redraws: whether nothing else writes to the terminal, so that a view may draw over itself.
    """
    if console.quiet:
        return nullcontext()
    if not (redraws and console.can_redraw):
        return _log_lines(console, meter)
    return Live(
        console=console.rich,
        get_renderable=lambda: live_view(meter.read()),
        refresh_per_second=_REFRESHES_PER_SECOND,
        transient=True,
        redirect_stdout=False,  # stdout is for rows
    )


@contextmanager
def _log_lines(console: Console, meter: ProgressMeter) -> Iterator[None]:
    """Write a plain line every `LOG_SECONDS`, none after the end of the context."""
    ends = threading.Event()

    def write_lines() -> None:
        while not ends.wait(LOG_SECONDS):  # waits on the monotonic clock
            console.line(log_line(meter.read()))

    thread = threading.Thread(target=write_lines, name="cbgen-display", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def log_line(progress: Progress) -> str:
    """Return a job's state as one plain line."""
    parts = [clock(progress.elapsed), progress.phase]
    if progress.engine.num_blocks:
        parts = [clock(progress.elapsed), _rows(progress), _tokens(progress), *_engine(progress)]
        if progress.seconds_left is not None:
            parts.append(f"about {clock(progress.seconds_left)} left")
    return " | ".join(parts)


def live_view(progress: Progress) -> RenderableType:
    """Return a job's state as a block of at most three lines."""
    head = Table.grid(padding=(0, 2))
    share = progress.share_done if progress.engine.num_blocks else None
    bar = ProgressBar(
        total=None if share is None else 1.0,
        completed=share or 0.0,
        width=_BAR_WIDTH,
        pulse=share is None,
        complete_style="cyan",
        pulse_style="cyan",
    )
    rows = Text(_rows(progress), no_wrap=True, overflow="ellipsis")
    if progress.rows_failed:
        rows.stylize("red", rows.plain.rindex(",") + 2)
    head.add_row(Text(progress.phase, style="bold", no_wrap=True), bar, rows)
    if not progress.engine.num_blocks:
        return head
    times = f"{clock(progress.elapsed)} elapsed"
    if progress.seconds_left is not None:
        times += f", about {clock(progress.seconds_left)} left"
    return Group(head, _dim(times, _tokens(progress)), _dim(*_engine(progress)))


def _rows(progress: Progress) -> str:
    text = f"{count(progress.rows_done, 'rows')} done"
    if progress.rows_left is not None:
        text += f", {count(progress.rows_left)} left"
    if progress.rows_failed:
        text += f", {count(progress.rows_failed)} failed"
    return text


def _tokens(progress: Progress) -> str:
    return f"{rate(progress.tokens_in)} tokens/s in, {rate(progress.tokens_out)} out"


def _engine(progress: Progress) -> list[str]:
    engine = progress.engine
    parts = [
        f"{count(engine.num_running)} running, {count(engine.num_waiting)} waiting",
        f"cache {percent(engine.num_used_blocks / max(1, engine.num_blocks))}",
    ]
    if engine.num_preemptions:
        parts.append(count(engine.num_preemptions, "preemptions"))
    return parts


def _dim(*parts: str) -> Text:
    return Text(" · ".join(parts), style="dim", no_wrap=True, overflow="ellipsis")
