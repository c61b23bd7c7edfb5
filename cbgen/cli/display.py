"""Shows a running job: a live block on a terminal, else a plain line every ten seconds.

Draws on a thread of its own, so the job never waits for it.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self

from rich.live import Live

from cbgen.cli.progress import ProgressMeter
from cbgen.cli.screen import Screen
from cbgen.cli.view import live_view, log_line

LOG_SECONDS = 10.0
"""Seconds between two plain lines."""
_REFRESHES_PER_SECOND = 4


def job_display(
    screen: Screen, meter: ProgressMeter, *, redraws: bool
) -> AbstractContextManager[object]:
    """Return what shows a job as long as its context is open.

    Args:
        screen: where to; nothing is shown on a quiet one.
        meter: the job.
        redraws: whether the terminal is the display's alone, so that it may draw over itself.
    """
    if screen.quiet:
        return nullcontext()
    if not (redraws and screen.can_redraw):
        return LogLines(screen, meter)
    return Live(
        console=screen.console,
        get_renderable=lambda: live_view(meter.read()),
        refresh_per_second=_REFRESHES_PER_SECOND,
        transient=True,
        redirect_stdout=False,  # stdout is for rows
    )


class LogLines:
    """Writes a plain line every `LOG_SECONDS`."""

    def __init__(self, screen: Screen, meter: ProgressMeter) -> None:
        self._screen = screen
        self._meter = meter
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cbgen-display", daemon=True)

    def __enter__(self) -> Self:
        """Start."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop; no line is written after this."""
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(LOG_SECONDS):  # waits on the monotonic clock
            self._screen.line(log_line(self._meter.read()))
