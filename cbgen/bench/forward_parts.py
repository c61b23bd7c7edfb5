"""Measures what the parts of forward passes take, where the model lets that be seen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from cbgen.engine.cpu.decoder import take_part_seconds


class ForwardParts:
    """Seconds of the parts of a model's forward passes since the last `begin`.

    On a GPU kernels run behind the program, and what is seen here is not their time.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._head_s = 0.0
        self._head_started = 0.0

    def begin(self) -> None:
        """Start anew."""
        take_part_seconds(self._model)
        self._head_s = 0.0

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part; those of decoder layers only where they are fused."""
        seconds = take_part_seconds(self._model)
        return seconds | {"head": seconds.get("head", 0.0) + self._head_s}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure the output embedding for the time of the block."""
        head = self._model.get_output_embeddings()
        if not isinstance(head, nn.Module):
            yield
            return
        hooks = [head.register_forward_pre_hook(self._start), head.register_forward_hook(self._end)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _start(self, *_arguments: object) -> None:
        self._head_started = time.perf_counter()

    def _end(self, *_arguments: object) -> None:
        self._head_s += time.perf_counter() - self._head_started
