"""What callers of the manager get raised when there is no engine to answer them (any more)."""

from __future__ import annotations

from collections.abc import Mapping

from cbgen.errors import EngineError
from cbgen.manager.streams import RequestOutput


class ManagerStopped(EngineError, RuntimeError):
    """The manager takes no requests: it was stopped, or has been destroyed."""


class EngineDied(EngineError, RuntimeError):
    """The engine failed while requests were waiting for it; the cause is attached.

    Attributes:
        outputs: requests that had been answered and not been fetched before, by id.
    """

    def __init__(self, message: str, outputs: Mapping[str, RequestOutput] | None = None) -> None:
        super().__init__(message)
        self.outputs: dict[str, RequestOutput] = dict(outputs or {})
