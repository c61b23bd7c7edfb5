"""What is known of a model once it has been probed: numbers for the plan and the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from cbgen.engine.cache.groups import LayerFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes of a loaded model."""

    model_type: str
    layers: tuple[LayerFacts, ...]
    """Attention layers, in order."""
    vocab_size: int
    """Rows of the input embedding: token ids are in [0, vocab_size)."""
    logits_size: int
    """Columns of the logits."""
    hidden_size: int
    max_context: int | None
    """Tokens that the positions of the model allow; None = the config sets no bound."""
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int


def end_of_sequence_ids(model: PreTrainedModel, tokenizer: object | None) -> frozenset[int]:
    """Return the ends of sequence that config, generation config and tokenizer name.

    Ids below 0, which some configs have for "none", are left out.
    """
    token_ids: set[int] = set()
    for source in (model.config.get_text_config(), model.generation_config, tokenizer):
        given = getattr(source, "eos_token_id", None)
        if given is not None:
            token_ids.update((given,) if isinstance(given, int) else given)
    return frozenset(token_id for token_id in token_ids if token_id >= 0)
