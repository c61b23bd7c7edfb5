"""The engines that run in this process, and what becomes of them when it exits or forks.

Their threads are daemons, so that a forgotten stop does not keep the process alive. One that is
killed inside of torch may take the interpreter down with it, so each is stopped at the exit.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  its hook has to be registered before the one below
import os
import sys
import threading
import time
from typing import Protocol

EXITING = (
    "the main thread has ended, and with it the manager takes no more requests; let the main "
    "thread wait for the threads that use the manager (join) and then stop() it"
)
EXIT_SECONDS = 10.0


class RunningEngine(Protocol):
    """An engine on its thread."""

    @property
    def is_held(self) -> bool:
        """Whether a pause holds it, so that it runs nothing."""

    def stop(self, *, hard_stop: bool, timeout: float | None) -> bool:
        """End it; with `hard_stop` at once, else when all requests are answered."""

    def join(self, timeout: float | None) -> bool:
        """Wait for its end."""

    def lose(self) -> None:
        """Learn that this process was forked and has no thread for the engine."""


class RunningEngines:
    """Owns the list of them. Takes no locks, which a fork could leave locked for ever."""

    def __init__(self) -> None:
        self._engines: set[RunningEngine] = set()
        self._is_exiting = False

    @property
    def is_exiting(self) -> bool:
        """Whether the main thread has ended."""
        return self._is_exiting

    def add(self, engine: RunningEngine) -> None:
        """Note one that has started."""
        self._engines.add(engine)

    def discard(self, engine: RunningEngine) -> None:
        """Forget one that has ended."""
        self._engines.discard(engine)

    def end_waits(self) -> None:
        """Let no thread wait for ever for requests that the main thread can no longer add.

        What was added is answered, unless the main thread has failed.
        """
        self._is_exiting = True
        has_failed = getattr(sys, "last_value", None) is not None
        for engine in list(self._engines):
            engine.stop(hard_stop=has_failed, timeout=0)

    def stop_all(self) -> None:
        """Stop them at the exit; one that a pause holds runs nothing and can be left alone."""
        engines = [engine for engine in list(self._engines) if not engine.is_held]
        for engine in engines:
            engine.stop(hard_stop=True, timeout=0)
        deadline = time.monotonic() + EXIT_SECONDS
        for engine in engines:
            engine.join(max(0.0, deadline - time.monotonic()))

    def lose_all(self) -> None:
        """Forget those of the process that this one was forked from."""
        engines, self._engines = self._engines, set()
        for engine in engines:
            engine.lose()


running = RunningEngines()
atexit.register(running.stop_all)
os.register_at_fork(after_in_child=running.lose_all)
# Not public, but how executors do it: unlike atexit it comes before threads are waited for. The
# last to register is called first, so here before executors wait for their threads.
if hasattr(threading, "_register_atexit"):
    threading._register_atexit(running.end_waits)
