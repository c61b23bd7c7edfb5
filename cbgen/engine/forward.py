"""One forward pass over the packed tokens of a step."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from cbgen.engine.attention.context import paged_step
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
