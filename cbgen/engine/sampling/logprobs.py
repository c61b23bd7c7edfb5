"""Log-probabilities of tokens under scores [rows, vocab]."""

from __future__ import annotations

import torch

from cbgen.engine.sizing import SAMPLER_CHUNK


def token_logprobs(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of one token a row: float32 [rows].

    Args:
        scores: [rows, vocab], any float dtype: raw logits, or scores with -inf for what was
            filtered out.
        token_ids: [rows] int64.
    """
    chunk_rows = max(1, SAMPLER_CHUNK // scores.shape[-1])
    parts = [
        some_scores.float().log_softmax(dim=-1).gather(1, some_ids[:, None])[:, 0]
        for some_scores, some_ids in zip(
            torch.split(scores, chunk_rows), torch.split(token_ids, chunk_rows), strict=True
        )
    ]
    return torch.cat(parts)
