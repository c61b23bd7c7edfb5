"""Draws one token a row from logits [rows, vocab], every row with its own parameters.

    logits -> processors -> temperature -> thresholds (top_k, top_p, min_p) -> noise -> best token

Filters are thresholds on a row's scores, so that a row's outcome depends on the row alone: equal
scores stay or go together, and neither the width of a shared sort nor a neighbour's top_k moves
anything. A filter that no row uses is not computed. Tokens that no noise could lift to the top are
dropped before noise is drawn, which changes nothing: noise lies between MIN_NOISE and MAX_NOISE.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from cbgen.engine.sampling.logprobs import token_logprobs
from cbgen.engine.sampling.noise import (
    MAX_NOISE,
    MIN_NOISE,
    add_noise_to_all,
    add_noise_to_few,
    row_keys,
)
from cbgen.engine.sampling.processors import LogitsProcessors
from cbgen.engine.sampling.scores import Logits, Scores
from cbgen.engine.sizing import SAMPLER_CHUNK
from cbgen.engine.step import AdmittedRow, SampledTokens, ScheduledRequest

_ALL_TOKENS = 2**31
"""More than any vocabulary has; a larger top_k may not fit into 64 bits."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of the rows of one step, gathered on the host; each tensor is [rows]."""

    rows: torch.Tensor
    """int64: the persistent rows."""
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
    has_processors: torch.Tensor
    """bool: whether a logits processor changes the row's logits."""

    def select(self, index: torch.Tensor) -> SamplingRows:
        """Return the rows at `index` [k] int64."""
        return SamplingRows(*(getattr(self, name)[index] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """What a step drew, on the device; `samples` waits for it."""

    token_ids: torch.Tensor
    """[rows] int64; without meaning where the logits were not numbers."""
    answers: torch.Tensor
    """The same, with -1 where the logits were not numbers: all that the host must know of them."""
    logprobs: tuple[tuple[list[int], torch.Tensor], ...] = ()
    """Places among the rows that asked, and their values."""

    def samples(self) -> tuple[SampledTokens, ...]:
        """Return what each row got."""
        logprobs: dict[int, tuple[float]] = {}
        for places, values in self.logprobs:
            logprobs.update((p, (v,)) for p, v in zip(places, values.tolist(), strict=True))
        return tuple(
            SampledTokens((token_id,), logprobs.get(place, ()))
            if token_id >= 0
            else SampledTokens((), (), is_finite=False)
            for place, token_id in enumerate(self.answers.tolist())
        )


class Sampler:
    """Owns the sampling parameters of the persistent rows, and draws the tokens of each step.

    An entry is written at admission and read by every step that samples the row. Parameters are
    kept on the host, so that a step only gathers them and nothing waits for the device.

    Args:
        num_rows: persistent rows.
        logits_size: columns of the logits.
        device: where tokens are drawn.
    """

    def __init__(self, num_rows: int, logits_size: int, device: torch.device) -> None:
        self._temperature = torch.zeros(num_rows, dtype=torch.float32)
        self._top_k = torch.zeros(num_rows, dtype=torch.long)
        self._top_p = torch.ones(num_rows, dtype=torch.float64)
        self._min_p = torch.zeros(num_rows, dtype=torch.float64)
        self._seed = torch.zeros(num_rows, dtype=torch.long)
        self._logprobs: list[Literal["raw", "processed"] | None] = [None] * num_rows
        self._has_processors = torch.zeros(num_rows, dtype=torch.bool)
        self._needs_logits = [False] * num_rows
        self._processors = LogitsProcessors(num_rows, logits_size, device)

    def admit(self, admitted: Sequence[AdmittedRow]) -> None:
        """Take the parameters of newly admitted requests."""
        for item in admitted:
            row, params = item.row, item.params
            self._temperature[row] = params.temperature
            self._top_k[row] = min(params.top_k, _ALL_TOKENS)
            self._top_p[row] = params.top_p
            self._min_p[row] = params.min_p
            self._seed[row] = params.seed
            self._logprobs[row] = params.logprobs
            has_processors = self._processors.admit(item)
            self._has_processors[row] = has_processors
            self._needs_logits[row] = (
                params.temperature > 0 or params.logprobs is not None or has_processors
            )

    def draw(self, scores: Scores, sampled: Sequence[ScheduledRequest]) -> DrawnTokens:
        """Draw a token for each request that samples, without waiting for the device."""
        logprobs: tuple[tuple[list[int], torch.Tensor], ...] = ()
        if any(self._needs_logits[item.row] for item in sampled):
            logits, rows = scores.logits(), self._gather(sampled)
            token_ids, is_finite = sample(logits, rows, self._processors)
            logprobs = self._token_logprobs(logits, rows, token_ids, sampled)
            self._processors.append([item.row for item in sampled], token_ids)
        else:
            best, token_ids = scores.best()
            is_finite = best.isfinite()
        return DrawnTokens(token_ids, torch.where(is_finite, token_ids, -1), logprobs)

    def _gather(self, sampled: Sequence[ScheduledRequest]) -> SamplingRows:
        """Return the parameters of the requests that sample in this step, in their order."""
        rows = torch.tensor([item.row for item in sampled])
        return SamplingRows(
            rows=rows,
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seed=self._seed[rows],
            positions=torch.tensor([item.start + item.num_tokens for item in sampled]),
            has_processors=self._has_processors[rows],
        )

    def _token_logprobs(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        token_ids: torch.Tensor,
        sampled: Sequence[ScheduledRequest],
    ) -> tuple[tuple[list[int], torch.Tensor], ...]:
        """Return the places of the requests that asked for log-probabilities, and these."""
        found = []
        modes = [self._logprobs[item.row] for item in sampled]
        for mode in ("raw", "processed"):
            places = [place for place, wanted in enumerate(modes) if wanted == mode]
            if not places:
                continue
            host_index = torch.tensor(places)
            index = _to(logits.device, host_index)
            chosen = token_ids[index]
            if mode == "raw":
                values = token_logprobs(logits[index], chosen)
            else:
                values = processed_logprobs(
                    logits[index], chosen, rows.select(host_index), self._processors
                )
            found.append((places, values))
        return tuple(found)


def sample(
    logits: torch.Tensor, rows: SamplingRows, processors: LogitsProcessors | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row.

    Args:
        logits: [rows, vocab], any float dtype; not changed.
        rows: parameters, on the host.
        processors: change the logits of the rows that have some.

    Returns:
        The token of each row, [rows] int64, and whether the row's best logit was a finite number,
        [rows] bool; where it was not, the token means nothing. Both on the device of the logits.
    """
    best, token_ids = Logits(logits).best()
    is_noisy = rows.temperature > 0
    for places, scores in _chunks(logits, rows, is_noisy, processors):
        index = _to(logits.device, places)
        token_ids[index] = _sample_noisy(scores, rows.select(places))
    for places, scores in _chunks(logits, rows, rows.has_processors & ~is_noisy, processors):
        token_ids[_to(logits.device, places)] = Logits(scores).best()[1]
    return token_ids, best.isfinite()


def processed_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    rows: SamplingRows,
    processors: LogitsProcessors | None = None,
) -> torch.Tensor:
    """Return log-probabilities under what processors, temperature and filters made of the logits.

    A greedy row has neither temperature nor filters. Arguments as of `sample`, and the tokens;
    float32 [rows].
    """
    values = token_logprobs(logits, token_ids)
    is_noisy = rows.temperature > 0
    for places, scores in _chunks(logits, rows, is_noisy, processors):
        index = _to(logits.device, places)
        scores, threshold = _filtered(scores, rows.select(places))
        scores = scores.masked_fill(scores < threshold[:, None], float("-inf"))
        values[index] = token_logprobs(scores, token_ids[index])
    for places, scores in _chunks(logits, rows, rows.has_processors & ~is_noisy, processors):
        index = _to(logits.device, places)
        values[index] = token_logprobs(scores, token_ids[index])
    return values


def _chunks(
    logits: torch.Tensor,
    rows: SamplingRows,
    wanted: torch.Tensor,
    processors: LogitsProcessors | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the places of wanted rows, some at a time, and what processors make of their logits."""
    places = torch.nonzero(wanted).flatten()
    if len(places) == 0:
        return
    for chunk in torch.split(places, max(1, SAMPLER_CHUNK // logits.shape[-1])):
        scores = logits[_to(logits.device, chunk)]
        if processors is not None and bool(rows.has_processors[chunk].any()):
            scores = processors.process(scores, rows.rows[chunk])
        yield chunk, scores


def _sample_noisy(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    scores, threshold = _filtered(logits, rows)
    threshold = torch.maximum(threshold, scores.amax(dim=-1) - (MAX_NOISE - MIN_NOISE))
    device = logits.device
    keys = row_keys(_to(device, rows.seed), _to(device, rows.positions))
    add_noise = add_noise_to_few if device.type == "cpu" else add_noise_to_all
    return add_noise(scores, threshold, keys).argmax(dim=-1)


def _filtered(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores [rows, vocab] float32 and the smallest score that each row's filters keep."""
    device = logits.device
    # A minimal temperature of 1e-5 keeps the quotient finite; below, the best token wins anyway.
    temperature = _to(device, rows.temperature.clamp(min=1e-5))
    scores = logits.float() / temperature[:, None]
    threshold = torch.full_like(temperature, float("-inf"))
    if bool((rows.min_p > 0).any()):
        least = scores.amax(dim=-1).double() + torch.log(_to(device, rows.min_p))  # log(0) is -inf
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
    top_k = _to(scores.device, top_k.clamp(max=width))[:, None]
    top_p = _to(scores.device, rows.top_p)[:, None]
    weights = torch.exp(values - values[:, :1])
    sums = weights.cumsum(dim=-1)
    total = sums.gather(1, top_k - 1)
    ranks = torch.arange(width, device=scores.device)
    # A token stays while the better ones together have less than top_p; the best always stays.
    kept = (ranks < top_k) & (((sums - weights) < top_p * total) | (top_p >= 1))
    count = kept.sum(dim=-1, keepdim=True).clamp(min=1)
    smallest = values.gather(1, count - 1)[:, 0].float()
    off = _to(scores.device, ~needs_sort)
    return smallest.masked_fill(off, float("-inf"))


def _to(device: torch.device, values: torch.Tensor) -> torch.Tensor:
    """Return host values on the device, without waiting for it."""
    return values.to(device, non_blocking=True)
