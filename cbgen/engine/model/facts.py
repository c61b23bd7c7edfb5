"""What is known of a model once it has been probed: numbers for the plan and the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
