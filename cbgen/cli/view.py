"""How a look at a running job is drawn: a block for a terminal, a line for a log."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cbgen.cli.progress import Progress
from cbgen.cli.wording import clock, count, percent, rate

_BAR_WIDTH = 24


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
        f"cache {percent(progress.cache_share)}",
    ]
    if engine.num_preemptions:
        parts.append(count(engine.num_preemptions, "preemptions"))
    return parts


def _dim(*parts: str) -> Text:
    return Text(" · ".join(parts), style="dim", no_wrap=True, overflow="ellipsis")
