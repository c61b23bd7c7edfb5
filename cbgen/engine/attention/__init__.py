"""Attention over pages: one file a backend, chosen by name."""

from __future__ import annotations

from cbgen.engine.attention.base import AttentionBackend
from cbgen.engine.attention.cpu import CpuBackend
from cbgen.engine.attention.eager import EagerBackend
from cbgen.engine.attention.sdpa import SdpaBackend

__all__ = ["AttentionBackend", "backend_names", "make_backend"]

_BACKENDS: dict[str, type[CpuBackend] | type[SdpaBackend] | type[EagerBackend]] = {
    CpuBackend.name: CpuBackend,
    SdpaBackend.name: SdpaBackend,
    EagerBackend.name: EagerBackend,
}


def backend_names() -> tuple[str, ...]:
    """Return the names of all backends, best first."""
    return tuple(_BACKENDS)


def make_backend(name: str) -> AttentionBackend:
    """Return the backend of that name.

    Raises:
        KeyError: the name is unknown; recipes are checked before.
    """
    return _BACKENDS[name]()
