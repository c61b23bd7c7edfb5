"""How a run is stopped before its input ends: by a signal or by a time limit.

The first request lets the job end by itself and write what is finished. A second signal ends the
process, and so does a job that takes too long to end. A thread watches for both: it reads signals
from a pipe, so it hears them even while the main thread is busy in a library.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Self

from cbgen.cli.exits import ExitCode, Terminated
from cbgen.errors import UsageError
from cbgen.job.run_job import EarlyStop

FORCE_SECONDS = 20.0
"""Time that a job has to end after it was asked to."""
REPEAT_SECONDS = 1.0
"""A signal that comes sooner after the first one counts as the same: some shells send it twice."""
_SHOW_CURSOR = b"\x1b[?25h"
_LONGEST_WAIT = 3600.0
"""Seconds of one wait: the system takes no more than some years."""
_RAISE_AGAIN_SECONDS = 0.01
_END = 0
"""Written into the pipe to end the thread; no signal has this number."""

_UNITS = re.compile(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?")
_CLOCK = re.compile(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?")


class StopSignal(BaseException):
    """The run was stopped before there was a job that could end by itself."""


@dataclass(frozen=True, slots=True)
class StopReason:
    """Why a run ends early."""

    code: ExitCode
    text: str


class Stopper:
    """Asks a job to end on SIGINT, SIGTERM or for the given reasons; entered in the main thread.

    Args:
        early_stop: passes the request on to the job.
        tell: takes a line for people.
        time_limit: seconds that the process may take in all.
        requeue_signal: another signal that stops the run, as the time limit does.
    """

    def __init__(
        self,
        early_stop: EarlyStop,
        tell: Callable[[str], None],
        *,
        time_limit: float | None = None,
        requeue_signal: signal.Signals | None = None,
    ) -> None:
        self.reason: StopReason | None = None
        """Why the run ends early; None while nothing stops it."""
        self.early_stop = early_stop
        self._tell = tell
        self._signals = {
            signal.SIGINT: StopReason(ExitCode.INTERRUPTED, "interrupted"),
            signal.SIGTERM: StopReason(ExitCode.TERMINATED, "interrupted"),
        }
        if requeue_signal is not None:
            text = f"stopped by {requeue_signal.name}"
            self._signals[requeue_signal] = StopReason(ExitCode.STOPPED, text)
        self._limit_at: float | None = None
        """When the time limit lets no further row begin, in seconds of `time.monotonic()`."""
        if time_limit is not None:
            end = time.monotonic() - process_age() + time_limit
            # Rows that still run are cancelled then; the rest of the time is for writing.
            self._cancel_at = end - min(20.0, max(2.0, time_limit / 30))
            self._limit_at = self._cancel_at - min(60.0, time_limit / 10)
        self._interrupted: float | None = None
        self._force_at: float | None = None
        self._may_raise = False  # not while signals are being taken over
        self._has_raised = False
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._previous_descriptor = -1
        self._previous_hook = sys.unraisablehook
        self._read_end, self._write_end = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="cbgen-stopper", daemon=True)

    def __enter__(self) -> Self:
        """Take over the signals, if this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            os.set_blocking(self._write_end, False)
            self._previous_descriptor = signal.set_wakeup_fd(self._write_end)
            # A shell starts background processes with SIGINT ignored; it stays ignored.
            numbers = [
                number
                for number, reason in self._signals.items()
                if reason.code is ExitCode.STOPPED or signal.getsignal(number) != signal.SIG_IGN
            ]
            numbers.append(signal.SIGALRM)
            self._previous = {int(n): signal.signal(n, self._on_signal) for n in numbers}
            self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        self._thread.start()
        self._may_raise = True
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the signal handlers."""
        self._may_raise = False
        if self._previous:
            signal.set_wakeup_fd(self._previous_descriptor)
            sys.unraisablehook = self._previous_hook
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.write(self._write_end, bytes([_END]))
        self._thread.join()
        os.close(self._read_end)
        os.close(self._write_end)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Raise in the main thread, unless it runs a job's loop, which ends by itself."""
        self.reason = self.reason or self._signals.get(signal.Signals(number))
        waits = self.early_stop.has_job or self.early_stop.is_importing
        if self._may_raise and not waits and not self._has_raised:
            self._has_raised = True
            raise StopSignal

    def _on_unraisable(self, what: sys.UnraisableHookArgs) -> None:
        """Raise a StopSignal once more that came while Python could not let it through."""
        if not isinstance(what.exc_value, StopSignal):
            self._previous_hook(what)
            return
        self._has_raised = False
        signal.setitimer(signal.ITIMER_REAL, _RAISE_AGAIN_SECONDS)  # sends SIGALRM

    def _watch(self) -> None:
        try:
            self._hear_signals()
        except Exception as error:  # noqa: BLE001  nobody would hear a signal any more
            self.reason = StopReason(ExitCode.FAILED, f"the watch for signals failed: {error!r}")
            self._interrupt_main_thread()
            self._ask(0.0)
            time.sleep(FORCE_SECONDS)
            self._end_process()

    def _hear_signals(self) -> None:
        while True:
            wake_at = self._limit_at if self._force_at is None else self._force_at
            remaining = _LONGEST_WAIT if wake_at is None else wake_at - time.monotonic()
            timeout = min(max(0.0, remaining), _LONGEST_WAIT)
            ready, _, _ = select.select([self._read_end], (), (), timeout)
            if not ready:
                if wake_at is None or remaining > timeout:
                    continue
                if self._force_at is not None:
                    self._end_process()
                self._reach_limit()
                continue
            for number in os.read(self._read_end, 1024):
                if number == _END:
                    return
                self._take(number)

    def _take(self, number: int) -> None:
        """Ask the job to end on a signal; end the process on a later second one."""
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
        self.reason = self.reason or StopReason(ExitCode.STOPPED, "stopped by --time-limit")
        self._interrupt_main_thread()
        grace = max(0.0, self._cancel_at - time.monotonic())
        if self.early_stop.has_job and grace >= 1:
            self._tell(f"time limit: running rows have {grace:.0f} s to finish, no more are begun")
        self._ask(grace)

    def _interrupt_main_thread(self) -> None:
        if self._previous:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    def _ask(self, grace: float) -> None:
        force_at = time.monotonic() + grace + FORCE_SECONDS
        self._force_at = force_at if self._force_at is None else min(force_at, self._force_at)
        self.early_stop.ask(grace)

    def _end_process(self) -> None:
        assert self.reason is not None, "the process ends for a reason"
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR)  # past the console, whose lock may be held
        os._exit(self.reason.code)


def process_age() -> float:
    """Return the seconds since this process began, 0 if the system does not tell."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def parse_signal(text: str) -> signal.Signals:
    """Return the signal of a name or number: `USR1`, `SIGUSR1`, `10`.

    Raises:
        UsageError: there is no such signal, or it has another meaning already.
    """
    name = text.strip().upper()
    try:
        if name.isdecimal():
            number = signal.Signals(int(name))
        else:
            number = signal.Signals[f"SIG{name.removeprefix('SIG')}"]
    except (ValueError, KeyError):
        raise UsageError(f"--requeue-signal is {text!r}; expected a signal such as USR1") from None
    taken = (signal.SIGKILL, signal.SIGSTOP, signal.SIGALRM, signal.SIGINT, signal.SIGTERM)
    if number in taken:
        raise UsageError(
            f"--requeue-signal is {text!r}; that signal already has a meaning; use USR1"
        )
    return number


def parse_duration(text: str) -> float:
    """Return the seconds of `90`, `90s`, `15m`, `3h50m`, `2d`, or of Slurm's `1-02:03:04`.

    A number alone is seconds, `mm:ss` and `hh:mm:ss` are read as on a clock, and hours follow days.

    Raises:
        UsageError: the text has another form, or is zero.
    """
    parts = [0, 0, 0, 0]
    if units := _UNITS.fullmatch(text.strip()):
        parts = [int(part or 0) for part in units.groups()]
    elif clock := _CLOCK.fullmatch(text.strip()):
        first, *others = clock.groups()
        given = [int(part) for part in others if part is not None]
        # After days the first number is hours; without them the last one is seconds.
        aligned = [*given, 0, 0][:3] if first else [0, 0, *given][-3:]
        parts = [int(first or 0), *aligned]
    days, hours, minutes, seconds = parts
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise UsageError(
            f"--time-limit is {text.strip()!r}; expected a time such as 90s, 15m, 3h50m or "
            "1-02:03:04"
        )
    return float(total)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise Terminated in the main thread on SIGTERM, so that it ends a command as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_terminated(number: int, frame: FrameType | None) -> None:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
