"""Draws one token a row from logits [rows, vocab], every row with its own parameters.

Filters are thresholds on a row's scores, so that a row's outcome depends on the row alone: equal
scores stay or go together, and neither the width of a shared sort nor a neighbour's top_k moves
anything. A filter that no row uses is not computed. Tokens that no noise could lift to the top are
dropped before noise is drawn, which changes nothing: noise lies between MIN_NOISE and MAX_NOISE.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cbgen.engine.sampling.noise import MAX_NOISE, MIN_NOISE, gumbel_noise, row_keys
from cbgen.engine.sampling.scores import Logits

_CHUNK_ELEMENTS = 1 << 22
"""Scores that are worked on at once; bounds the memory of the vocabulary-wide tensors."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of the rows of one step, gathered on the host; each tensor is [rows]."""

    temperature: torch.Tensor
    """float32; 0 = greedy."""
    top_k: torch.Tensor
    """int64; 0 = off."""
    top_p: torch.Tensor
    """float64; 1 = off."""
    min_p: torch.Tensor
    """float64; 0 = off."""
    seed: torch.Tensor
    """int64."""
    positions: torch.Tensor
    """int64: position in the sequence of the token that is drawn."""

    def select(self, index: torch.Tensor) -> SamplingRows:
        """Return the rows at `index` [k] int64."""
        return SamplingRows(
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            seed=self.seed[index],
            positions=self.positions[index],
        )


def sample(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row.

    Args:
        logits: [rows, vocab], any float dtype.
        rows: parameters, on the host.

    Returns:
        The token of each row, [rows] int64, and whether the row's best logit was a finite number,
        [rows] bool; where it was not, the token means nothing. Both on the device of the logits.
    """
    best, token_ids = Logits(logits).best()
    noisy = torch.nonzero(rows.temperature > 0).flatten()
    chunk_rows = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    for index in torch.split(noisy, chunk_rows) if len(noisy) else ():
        places = index.to(logits.device)
        token_ids[places] = _sample_noisy(logits[places], rows.select(index))
    return token_ids, best.isfinite()


def _sample_noisy(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    scores, threshold = _filtered(logits, rows)
    threshold = torch.maximum(threshold, scores.amax(dim=-1) - (MAX_NOISE - MIN_NOISE))
    row_index, token_index = torch.nonzero(scores >= threshold[:, None], as_tuple=True)
    device = logits.device
    keys = row_keys(rows.seed.to(device), rows.positions.to(device))
    noisy = torch.full(scores.shape, float("-inf"), dtype=torch.float64, device=device)
    noise = gumbel_noise(keys[row_index], token_index)
    noisy[row_index, token_index] = scores[row_index, token_index].double() + noise
    return noisy.argmax(dim=-1)


def _filtered(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores [rows, vocab] float32 and the smallest score that each row's filters keep."""
    device = logits.device
    # A minimal temperature of 1e-5 keeps the quotient finite; below, the best token wins anyway.
    temperature = rows.temperature.clamp(min=1e-5).to(device)
    scores = logits.float() / temperature[:, None]
    threshold = torch.full_like(temperature, float("-inf"))
    if bool((rows.min_p > 0).any()):
        least = scores.amax(dim=-1).double() + torch.log(rows.min_p.to(device))  # log(0) is -inf
        threshold = torch.maximum(threshold, least.float())
    if bool(((rows.top_k > 0) | (rows.top_p < 1)).any()):
        threshold = torch.maximum(threshold, _sorted_threshold(scores, rows))
    return scores, threshold


def _sorted_threshold(scores: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return the smallest score [rows] that top_k and then top_p keep; -inf for a row without both.

    Sums run in float64 along the row from the best score on, so that scores which another row's
    larger k brought in cannot change them.
    """
    vocab = scores.shape[-1]
    top_k = torch.where(rows.top_k > 0, rows.top_k.clamp(max=vocab), vocab)
    needs_sort = (rows.top_k > 0) | (rows.top_p < 1)
    width = int(top_k[needs_sort].max())
    values = scores.topk(width, dim=-1).values.double()  # [rows, width], best first
    top_k = top_k.clamp(max=width).to(scores.device)[:, None]
    top_p = rows.top_p.to(scores.device)[:, None]
    weights = torch.exp(values - values[:, :1])
    sums = weights.cumsum(dim=-1)
    total = sums.gather(1, top_k - 1)
    ranks = torch.arange(width, device=scores.device)
    # A token stays while the better ones together have less than top_p; the best always stays.
    kept = (ranks < top_k) & (((sums - weights) < top_p * total) | (top_p >= 1))
    count = kept.sum(dim=-1, keepdim=True).clamp(min=1)
    smallest = values.gather(1, count - 1)[:, 0].float()
    off = ~needs_sort.to(scores.device)
    return smallest.masked_fill(off, float("-inf"))


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities under the raw logits: float32 [rows].

    Args:
        logits: [rows, vocab], any float dtype.
        token_ids: [rows] int64.
    """
    chunk_rows = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    parts = [
        _chosen(chosen_logits.float(), chosen)
        for chosen_logits, chosen in zip(
            torch.split(logits, chunk_rows), torch.split(token_ids, chunk_rows), strict=True
        )
    ]
    return torch.cat(parts)


def processed_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, rows: SamplingRows
) -> torch.Tensor:
    """Return log-probabilities under what temperature and filters made of the logits.

    Greedy rows have neither, so theirs are those of `token_logprobs`. Arguments as there, and the
    rows' parameters; float32 [rows].
    """
    values = token_logprobs(logits, token_ids)
    noisy = torch.nonzero(rows.temperature > 0).flatten()
    for index in torch.split(noisy, max(1, _CHUNK_ELEMENTS // logits.shape[-1])):
        places = index.to(logits.device)
        scores, threshold = _filtered(logits[places], rows.select(index))
        scores = scores.masked_fill(scores < threshold[:, None], float("-inf"))
        values[places] = _chosen(scores, token_ids[places])
    return values


def _chosen(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return scores.log_softmax(dim=-1).gather(1, token_ids[:, None])[:, 0]
