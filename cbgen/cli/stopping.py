"""What ends a run before its input does: signals, and a time limit.

The first wish lets the job end by itself, with what is finished written; a second signal, or a job
that does not come to its end, ends the process. A thread of its own sees to that: signals reach it
through a pipe even while the main thread is busy in a library.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Self

from cbgen.cli.durations import parse_duration
from cbgen.cli.exits import ExitCode
from cbgen.errors import UsageError
from cbgen.job.early_stop import EarlyStop

FORCE_SECONDS = 20.0
"""Time that a job has to end once it was asked to."""
REPEAT_SECONDS = 1.0
"""A signal that comes sooner after the first one is the same wish: some shells send it twice."""
_SHOW_CURSOR = b"\x1b[?25h"
_END = 0
"""In the pipe, the number of no signal."""


class StopSignal(BaseException):
    """A run shall end, and there is no job yet that could end by itself."""


@dataclass(frozen=True, slots=True)
class StopReason:
    """Why a run ends early."""

    code: ExitCode
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """What may end a run early, beside SIGINT and SIGTERM."""

    time_limit: float | None = None
    """Seconds since the process began."""
    requeue_signal: signal.Signals | None = None


class Stopper:
    """Asks a job to end when it is time; to be entered in the main thread.

    Args:
        early_stop: who passes the wish on to the job.
        rules: what may end the run.
        tell: takes a line for people.
    """

    def __init__(
        self, early_stop: EarlyStop, rules: StopRules, tell: Callable[[str], None]
    ) -> None:
        self.reason: StopReason | None = None
        """Why the run ends early, None while it does not."""
        self._early_stop = early_stop
        self._tell = tell
        self._signals = {
            signal.SIGINT: StopReason(ExitCode.INTERRUPTED, "interrupted"),
            signal.SIGTERM: StopReason(ExitCode.TERMINATED, "interrupted"),
        }
        if rules.requeue_signal is not None:
            text = f"stopped by {rules.requeue_signal.name}"
            self._signals[rules.requeue_signal] = StopReason(ExitCode.STOPPED, text)
        self._limit = None if rules.time_limit is None else _TimeLimit(rules.time_limit)
        self._interrupted: float | None = None
        self._force_at: float | None = None
        self._has_raised = False
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._previous_descriptor = -1
        self._read_end, self._write_end = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="cbgen-stopper", daemon=True)

    def __enter__(self) -> Self:
        """Take over the signals; without effect on them outside of the main thread."""
        if threading.current_thread() is threading.main_thread():
            os.set_blocking(self._write_end, False)
            self._previous_descriptor = signal.set_wakeup_fd(self._write_end)
            # A shell starts what runs in the background with SIGINT ignored; that stays so.
            numbers = [
                number
                for number, reason in self._signals.items()
                if reason.code is ExitCode.STOPPED or signal.getsignal(number) != signal.SIG_IGN
            ]
            numbers.append(signal.SIGALRM)
            self._previous = {int(n): signal.signal(n, self._on_signal) for n in numbers}
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the signals back."""
        if self._previous:
            signal.set_wakeup_fd(self._previous_descriptor)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.write(self._write_end, bytes([_END]))
        self._thread.join()
        os.close(self._read_end)
        os.close(self._write_end)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """End what the main thread does, unless it is a job's loop, which ends by itself."""
        self.reason = self.reason or self._signals.get(signal.Signals(number))
        if not self._early_stop.has_job and not self._has_raised:
            self._has_raised = True
            raise StopSignal

    def _watch(self) -> None:
        while True:
            wake_at = self._force_at
            if wake_at is None and self._limit is not None:
                wake_at = self._limit.begins
            timeout = None if wake_at is None else max(0.0, wake_at - time.monotonic())
            ready, _, _ = select.select([self._read_end], (), (), timeout)
            if not ready:
                if self._force_at is not None:
                    self._end_process()
                self._reach_limit()
                continue
            for number in os.read(self._read_end, 1024):
                if number == _END:
                    return
                self._take(number)

    def _take(self, number: int) -> None:
        reason = self._signals.get(signal.Signals(number))
        if reason is None:
            return
        self.reason = self.reason or reason
        if reason.code is not ExitCode.STOPPED:
            now = time.monotonic()
            if self._interrupted is None:
                self._interrupted = now
            elif now - self._interrupted > REPEAT_SECONDS:
                self._end_process()
        self._ask(0.0)

    def _reach_limit(self) -> None:
        assert self._limit is not None, "only a limit ends the wait without a reason"
        self.reason = self.reason or StopReason(ExitCode.STOPPED, "stopped by --time-limit")
        if self._previous:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        grace = max(0.0, self._limit.cancels - time.monotonic())
        if self._early_stop.has_job and grace >= 1:
            self._tell(f"time limit: running rows have {grace:.0f} s to finish, no more are begun")
        self._ask(grace)

    def _ask(self, grace: float) -> None:
        force_at = time.monotonic() + grace + FORCE_SECONDS
        self._force_at = force_at if self._force_at is None else min(force_at, self._force_at)
        self._early_stop.ask(grace)

    def _end_process(self) -> None:
        assert self.reason is not None, "the process ends for a reason"
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR)  # past the console, whose lock may be held
        os._exit(self.reason.code)


class _TimeLimit:
    """The moments of a time limit, in seconds of `time.monotonic()`."""

    def __init__(self, seconds: float) -> None:
        end = time.monotonic() - process_age() + seconds
        self.cancels = end - min(20.0, max(2.0, seconds / 30))
        """When what still runs is cancelled: the rest is for writing and for leaving."""
        self.begins = self.cancels - min(60.0, seconds / 10)
        """When nothing is admitted any more."""


def process_age() -> float:
    """Return the seconds since this process began, 0 where the system does not tell."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def stop_rules(time_limit: str | None, requeue_signal: str | None) -> StopRules:
    """Return the rules that two options give.

    Raises:
        UsageError: one of them is wrong.
    """
    return StopRules(
        time_limit=None if time_limit is None else parse_duration(time_limit, "--time-limit"),
        requeue_signal=None
        if requeue_signal is None
        else parse_signal(requeue_signal, "--requeue-signal"),
    )


def parse_signal(text: str, option: str) -> signal.Signals:
    """Return the signal of a name or number: `USR1`, `SIGUSR1`, `10`.

    Raises:
        UsageError: there is no such signal, or a process cannot take it.
    """
    name = text.strip().upper()
    try:
        if name.isdecimal():
            number = signal.Signals(int(name))
        else:
            number = signal.Signals[f"SIG{name.removeprefix('SIG')}"]
    except (ValueError, KeyError):
        raise UsageError(f"{option} is {text!r}; expected a signal such as USR1") from None
    taken = (signal.SIGKILL, signal.SIGSTOP, signal.SIGALRM, signal.SIGINT, signal.SIGTERM)
    if number in taken:
        raise UsageError(f"{option} is {text!r}; that signal has its meaning already; use USR1")
    return number
