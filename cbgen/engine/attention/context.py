"""The one value that reaches a model's attention layers from outside: what the running step is.

Model keyword arguments would be cleaner, but some models drop them on the way (StableLM, Nemotron).
The runner alone sets the context, around each forward pass; it is local to the thread, so that two
engines in one process do not meet.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from cbgen.engine.attention.base import LayerAttention, LayerCache
from cbgen.engine.attention.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class PagedLayers:
    """Where the layers of an engine keep their keys and values; the same object in every step."""

    caches: Mapping[int, LayerCache]
    """By layer."""
    group_of: Mapping[int, int]
    """The group of a layer: an index of `PagedStep.attention`."""


@dataclass(frozen=True, slots=True)
class PagedStep:
    """What whole decoder layers need to attend by themselves."""

    layers: PagedLayers
    attention: tuple[AttentionMetadata, ...]
    """One entry for each layer group."""


class ForwardContext(Protocol):
    """Whoever answers the attention layers in a forward pass: the runner's step, or the probe."""

    positions: torch.Tensor
    """[T] int64: position of each token in its own request."""
    paged: PagedStep | None
    """For decoder layers of the C++ kernels; None where another backend must attend."""

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


def paged_step() -> PagedStep | None:
    """Return the pages of the running step, if decoder layers may attend by themselves."""
    return None if _current.context is None else _current.context.paged


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
