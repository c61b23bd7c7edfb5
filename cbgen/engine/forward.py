"""One forward pass over the packed tokens of a step, and what answers its attention layers."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from cbgen.engine.attention.base import AttentionBackend, LayerAttention
from cbgen.engine.attention.context import PagedStep, paged_step
from cbgen.engine.cpu.decoder import find_decoder
from cbgen.engine.sampling.scores import Logits, Scores


def run_model(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    position_ids: torch.Tensor,
    logit_indices: torch.Tensor,
) -> Scores:
    """Run one packed forward pass; by the C++ kernels, where they have the model's layers.

    The mask of ones keeps transformers from looking for packed sequences in the positions, which
    costs a device synchronization; the mask function of the hook then drops it.

    Args:
        model: the attached model.
        token_ids: [1, T] int64.
        position_ids: [1, T] int64.
        logit_indices: [n] int64, the tokens whose logits are wanted.

    Returns:
        Those of n rows, in the model's dtype.
    """
    step, decoder = paged_step(), find_decoder(model)
    if step is not None and decoder is not None:
        return decoder.scores(token_ids, position_ids, logit_indices, step)
    output = model(
        input_ids=token_ids,
        position_ids=position_ids,
        attention_mask=torch.ones_like(token_ids),
        use_cache=False,
        logits_to_keep=logit_indices,
    )
    return Logits(output.logits[0])


class StepContext:
    """Answers the model's attention layers during one step: stores keys and values, and attends.

    Args:
        positions: [T] int64, of each token in its own request.
        step: the pages, and the places of the step's tokens in them.
        backend: attends.
        fuses_layers: whether decoder layers of the C++ kernels may attend in its place.
    """

    def __init__(
        self,
        positions: torch.Tensor,
        step: PagedStep,
        backend: AttentionBackend,
        *,
        fuses_layers: bool,
    ) -> None:
        self.positions = positions
        self.paged = step if fuses_layers else None
        self._step = step
        self._backend = backend

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """Store the new keys and values and attend, see `ForwardContext.attend`."""
        layers = self._step.layers
        cache = layers.caches[layer_index]
        metadata = self._step.attention[layers.group_of[layer_index]]
        # All keys of the step are written before any of its queries attends: a request may read
        # blocks that another request of the same step fills.
        cache.write(key, value, metadata.slot_mapping)
        return self._backend.forward(query, cache, metadata, layer)
