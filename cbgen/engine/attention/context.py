"""The one value that reaches a model's attention layers from outside: what the running step is.

Model keyword arguments would be cleaner, but some models drop them on the way (StableLM, Nemotron).
The runner alone sets the context, around each forward pass; it is local to the thread, so that two
engines in one process do not meet.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from cbgen.engine.attention.base import LayerAttention


class ForwardContext(Protocol):
    """Whoever answers the attention layers in a forward pass: the runner's step, or the probe."""

    positions: torch.Tensor
    """[T] int64: position of each token in its own request."""

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """Store the new keys and values and attend; tensors are [T, heads, dim]."""


class _Current(threading.local):
    context: ForwardContext | None = None


_current = _Current()


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` answer the attention layers of this thread."""
    previous = _current.context
    _current.context = context
    try:
        yield
    finally:
        _current.context = previous


def current_context() -> ForwardContext:
    """Return the context of the running forward pass.

    Raises:
        RuntimeError: no step is running; the model was called by somebody else.
    """
    if _current.context is None:
        raise RuntimeError(
            "the model is attached to a cbgen engine and was called outside of a step; "
            "stop the manager, or call it within manager.pause()"
        )
    return _current.context
