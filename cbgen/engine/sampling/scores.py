"""What a forward pass gives: logits, computed as far as they are asked for, and probabilities."""

from __future__ import annotations

from typing import Protocol

import torch

from cbgen.engine.cpu.native import kernels
from cbgen.engine.sizing import SAMPLER_CHUNK


class Scores(Protocol):
    """Logits of the rows of a step."""

    def logits(self) -> torch.Tensor:
        """Return all of them: [rows, vocab], of any float dtype."""

    def best(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best logit of each row, and the first token that has it: [rows] each.

        Where a row has what is not a number, that is its best.
        """


class Logits:
    """Scores that are there already."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def logits(self) -> torch.Tensor:
        """Return them, see `Scores`."""
        return self._logits

    def best(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best logits and their tokens, see `Scores`.

        On a CPU the C++ kernels look for them: torch finds a maximum alone with vectors, not its
        place.
        """
        logits = self._logits
        library = kernels() if logits.device.type == "cpu" else None
        if library is None:
            best, token_ids = logits.max(dim=-1)
            return best, token_ids
        token_ids = library.largest(logits.float().contiguous())
        return logits.gather(1, token_ids[:, None])[:, 0], token_ids


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
