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

from cbgen.engine.attention.base import AttentionBackend, LayerAttention, LayerCache
from cbgen.engine.attention.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class PagedLayers:
    """Where the layers of an engine keep their keys and values; the same object in every step."""

    caches: Mapping[int, LayerCache]
    """By layer."""
    group_of: Mapping[int, int]
    """The group of a layer: an index of `PagedStep.attention`."""


class ForwardContext(Protocol):
    """Whoever answers the attention layers in a forward pass: the runner's step, or the probe."""

    @property
    def positions(self) -> torch.Tensor:
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


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Answers attention layers, or whole decoder layers, with the pages of an engine."""

    positions: torch.Tensor
    """[T] int64: position of each token in its own request."""
    layers: PagedLayers
    attention: tuple[AttentionMetadata, ...]
    """One entry for each layer group."""
    backend: AttentionBackend
    fuses_layers: bool
    """Whether decoder layers of the C++ kernels may attend in place of the backend."""

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """Store the new keys and values and attend, see `ForwardContext.attend`."""
        cache = self.layers.caches[layer_index]
        metadata = self.attention[self.layers.group_of[layer_index]]
        # All keys of the step are written before any of its queries attends: a request may read
        # blocks that another request of the same step fills.
        cache.write(key, value, metadata.slot_mapping)
        return self.backend.forward(query, cache, metadata, layer)


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
    context = _current.context
    return context if isinstance(context, PagedStep) and context.fuses_layers else None


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
