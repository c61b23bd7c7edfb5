"""All decoder layers of a model as one module, whose step is one call of the C++ kernels.

It stands alone in the model's list of layers. The layers that it stands for remain in it, and run
one after the other where attention is not that of the kernels: in a probe, or with another backend.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import torch
from torch import nn

from cbgen.engine.attention.context import PagedLayers, PagedStep, paged_step
from cbgen.engine.attention.metadata import AttentionMetadata
from cbgen.engine.model.decoder_layers import describe
from cbgen.engine.native import Kernels
from cbgen.engine.native_decoder import PARTS, Cache, Step, StepGroup


class FusedDecoder(nn.Module):
    """Stands for decoder layers that `decoder_layers.find_layers` has found."""

    def __init__(self, layers: nn.ModuleList, kernels: Kernels) -> None:
        super().__init__()
        self.layers = layers
        self._kernels = kernels
        self._description = describe(layers)
        self._placed: PagedLayers | None = None
        """The pages that the description points to."""
        self._seconds = (ctypes.c_double * len(PARTS))()
        self._lock = threading.Lock()
        """Held while the description is used: two engines may run one model."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **options: object,
    ) -> torch.Tensor:
        """Return [1, T, hidden size] of [1, T, hidden size]; any values where no logits are wanted.

        Args:
            hidden_states: float32.
            position_embeddings: cos and sin, [1, T, head size] float32 each.
            attention_mask: of the first layer; None within a step.
            options: whatever else the model hands to a layer; it matters to its own layers alone.
        """
        step = paged_step()
        if step is None or attention_mask is not None:
            for layer in self.layers:
                hidden_states = layer(
                    hidden_states,
                    position_embeddings=position_embeddings,
                    attention_mask=attention_mask,
                    **options,
                )
            return hidden_states
        output = hidden_states.clone(memory_format=torch.contiguous_format)
        rotary = [each[0].contiguous() for each in position_embeddings]
        with self._lock:
            if step.layers is not self._placed:
                self._place(step.layers)
            self._run(output[0], rotary, step)
        return output

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds that each part took since the last time this was asked."""
        seconds = dict(zip(PARTS, self._seconds, strict=True))
        ctypes.memset(self._seconds, 0, ctypes.sizeof(self._seconds))
        return seconds

    def _place(self, pages: PagedLayers) -> None:
        """Point the description at the pages of an engine."""
        description = self._description
        for index, layer in zip(description.layer_indices, description.layers, strict=True):
            keys, values = pages.caches[index].keys, pages.caches[index].values
            layer.cache = Cache(
                keys.data_ptr(),
                values.data_ptr(),
                *keys.stride()[:3],
                *values.stride()[:3],
                keys.shape[1],
            )
            layer.group = pages.group_of[index]
        self._placed = pages

    def _run(self, hidden: torch.Tensor, rotary: Sequence[torch.Tensor], step: PagedStep) -> None:
        """Run all layers over hidden states [T, hidden size], in place."""
        first, wanted = step.attention[0], step.logit_indices
        # Arrays must live until the call: the arguments hold addresses alone.
        groups = (StepGroup * len(step.attention))(*map(_group, step.attention))
        lists = (*first.query_starts, *first.key_lens)
        numbers = (ctypes.c_int64 * len(lists))(*lists)
        address = ctypes.addressof(numbers)
        cos, sin = rotary
        arguments = Step(
            hidden=hidden.data_ptr(),
            tokens=hidden.shape[0],
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            query_starts=address,
            key_lens=address + len(first.query_starts) * ctypes.sizeof(ctypes.c_int64),
            requests=first.num_requests,
            groups=groups,
            wanted=None if wanted is None else wanted.data_ptr(),
            num_wanted=0 if wanted is None else len(wanted),
            seconds=ctypes.addressof(self._seconds),
        )
        self._kernels.decode(self._description.decoder, arguments)


def take_part_seconds(model: nn.Module) -> dict[str, float]:
    """Return `FusedDecoder.take_seconds` of a model; empty if its layers are not fused."""
    found = [module for module in model.modules() if isinstance(module, FusedDecoder)]
    return found[0].take_seconds() if found else {}


def _group(metadata: AttentionMetadata) -> StepGroup:
    return StepGroup(
        metadata.block_tables.data_ptr(),
        metadata.block_tables.stride(0),
        metadata.slot_mapping.data_ptr(),
        metadata.span.window or 0,
        metadata.span.chunk or 0,
    )
