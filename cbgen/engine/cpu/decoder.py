"""A model whose decoder layers and last norm are one call of the C++ kernels a step.

A module stands for all layers in the model's list of layers. Those that it stands for remain in it,
and run one after the other where attention is not that of the kernels: in a probe, or with another
backend. Within a step the model's own code is passed by: embedding, rotary embedding of the
positions, the call, head.
"""

from __future__ import annotations

import ctypes
import threading

import torch
from torch import nn
from transformers import PreTrainedModel

from cbgen.engine.attention.context import PagedLayers, PagedStep
from cbgen.engine.attention.metadata import AttentionMetadata
from cbgen.engine.cpu.best_token import HeadScreen
from cbgen.engine.cpu.decoder_layers import ModelParts, describe, layer_indices
from cbgen.engine.cpu.native import PARTS, Cache, Kernels, Pages, Step, StepGroup
from cbgen.engine.sampling.scores import Logits, Scores


class FusedDecoder(nn.Module):
    """Stands for the decoder layers of a model that `decoder_layers.find_parts` has found."""

    def __init__(self, parts: ModelParts, kernels: Kernels) -> None:
        super().__init__()
        self.layers = parts.layers
        # Behind a plain object, so that the other parts stay the model's alone.
        self._parts = parts
        self._kernels = kernels
        self.screen: HeadScreen | None = None
        """What finds best tokens without the head, if it can."""
        self._description, self._described_layers = describe(parts)
        self._placed: PagedLayers | None = None
        """The pages that the description points to."""
        self._seconds = (ctypes.c_double * len(PARTS))()
        self._lock = threading.Lock()
        """Held while the description is used: two engines may run one model."""

    def forward(self, hidden_states: torch.Tensor, **options: object) -> torch.Tensor:
        """Return [1, T, hidden size] of [1, T, hidden size] by the layers, one after the other.

        Args:
            hidden_states: of the model's dtype.
            options: whatever else the model hands to a layer.
        """
        for layer in self.layers:
            hidden_states = layer(hidden_states, **options)
        return hidden_states

    def scores(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logit_indices: torch.Tensor,
        step: PagedStep,
    ) -> Scores:
        """Run the model over the tokens of a step, up to its head.

        Args:
            token_ids: [1, T] int64.
            position_ids: [1, T] int64.
            logit_indices: [n] int64, ascending: the tokens whose logits are wanted.
            step: what attention needs.

        Returns:
            Those of n rows, float32; they are computed when they are asked for.
        """
        parts = self._parts
        hidden: torch.Tensor = parts.embedding(token_ids)
        cos, sin = (each[0].contiguous() for each in parts.rotary(hidden, position_ids))
        output = torch.empty(len(logit_indices), hidden.shape[-1])
        with self._lock:
            if step.layers is not self._placed:
                self._place(step.layers)
            self._run(hidden[0], (cos, sin), logit_indices, output, step)
        return _HeadScores(output, parts.head, self.screen)

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds that each part took since the last time this was asked.

        Of the head it is what the screen took.
        """
        seconds = dict(zip(PARTS, self._seconds, strict=True))
        ctypes.memset(self._seconds, 0, ctypes.sizeof(self._seconds))
        return seconds | {"head": self.screen.take_seconds() if self.screen else 0.0}

    def _place(self, pages: PagedLayers) -> None:
        """Point the description at the pages of an engine."""
        indices = layer_indices(self.layers)
        for index, layer in zip(indices, self._described_layers, strict=True):
            keys, values = pages.caches[index].keys, pages.caches[index].values
            layer.cache = Cache(Pages.of(keys, values), keys.shape[1])
            layer.group = pages.group_of[index]
        self._placed = pages

    def _run(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        wanted: torch.Tensor,
        output: torch.Tensor,
        step: PagedStep,
    ) -> None:
        """Run all layers over hidden states [T, hidden size], which are used up."""
        first = step.attention[0]
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
            wanted=wanted.data_ptr(),
            num_wanted=len(wanted),
            output=output.data_ptr(),
            seconds=ctypes.addressof(self._seconds),
        )
        self._kernels.decode(self._description, arguments)


class _HeadScores:
    """Scores of hidden states [n, hidden size], which become logits if those are asked for."""

    def __init__(self, hidden: torch.Tensor, head: nn.Module, screen: HeadScreen | None) -> None:
        self._hidden = hidden
        self._head = head
        self._screen = screen

    def logits(self) -> torch.Tensor:
        logits: torch.Tensor = self._head(self._hidden)
        return logits

    def best(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._screen is None:
            return Logits(self.logits()).best()
        return self._screen.best(self._hidden)


def find_decoder(model: PreTrainedModel) -> FusedDecoder | None:
    """Return what stands for the layers of a model; None if they are its own."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != 1:
        return None
    (only,) = layers
    return only if isinstance(only, FusedDecoder) else None


def held_screen_bytes(model: PreTrainedModel) -> int:
    """Return the memory of the screen of a model's head; 0 if it has none."""
    decoder = find_decoder(model)
    return decoder.screen.num_bytes if decoder is not None and decoder.screen is not None else 0


def take_part_seconds(model: PreTrainedModel) -> dict[str, float]:
    """Return `FusedDecoder.take_seconds` of a model; empty if its layers are not fused."""
    decoder = find_decoder(model)
    return decoder.take_seconds() if decoder else {}


def _group(metadata: AttentionMetadata) -> StepGroup:
    return StepGroup(
        metadata.block_tables.data_ptr(),
        metadata.block_tables.stride(0),
        metadata.slot_mapping.data_ptr(),
        metadata.span.window or 0,
        metadata.span.chunk or 0,
    )
