"""The attention backends by name. A new one is a module of this package and a line here.

No torch: a backend's module is imported when the backend is asked for, so that a recipe is checked
without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

BACKENDS = {
    "cpu": "CpuBackend",
    "sdpa": "SdpaBackend",
    "eager": "EagerBackend",
}
"""Name of each backend and of its module -> its class, the best one first: `auto` takes the first
that supports model and machine."""

ALIASES = {"paged|eager": "eager"}
"""Other names that a recipe may give."""


def backend_class(name: str) -> Any:  # noqa: ANN401  its type would import torch
    """Return the class of a backend, see `attention.base.AttentionBackend`.

    Raises:
        KeyError: the name is unknown; recipes are checked before.
    """
    class_name = BACKENDS[name]
    return getattr(import_module(f"cbgen.engine.attention.{name}"), class_name)
