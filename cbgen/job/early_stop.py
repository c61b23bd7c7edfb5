"""The wish that a run ends before its input does, from whoever has it to the job that obeys.

The two meet at different times: a signal or a time limit may come while the model is still loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class EarlyStop:
    """Passes the wish on to a job, at once or when there is one. All methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._grace: float | None = None
        self._obey: Callable[[float], None] | None = None

    @property
    def has_job(self) -> bool:
        """Whether a job listens; before that, only an exception ends a run."""
        return self._obey is not None

    def ask(self, grace: float = 0.0) -> None:
        """Let the job end, with `grace` seconds for the rows that run; again for less grace."""
        with self._lock:
            self._grace = grace
            obey = self._obey
        if obey is not None:
            obey(grace)

    def attach(self, obey: Callable[[float], None]) -> None:
        """Let a job listen; a wish that was there before is passed on now."""
        with self._lock:
            self._obey = obey
            grace = self._grace
        if grace is not None:
            obey(grace)
