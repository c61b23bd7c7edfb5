"""SIGTERM as an exception, so that it ends a run on the same path as Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(BaseException):
    """The process got SIGTERM."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise Terminated in the main thread on SIGTERM; without effect in other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated
