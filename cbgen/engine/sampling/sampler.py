"""Draws one token a row from logits [rows, vocab], every row with its own parameters.

    logits -> processors -> temperature -> thresholds (top_k, top_p, min_p) -> noise -> best token

Filters are thresholds on a row's scores, so that a row's outcome depends on the row alone: equal
scores stay or go together, and neither the width of a shared sort nor a neighbour's top_k moves
anything. A filter that no row uses is not computed. Tokens that no noise could lift to the top are
dropped before noise is drawn, which changes nothing: noise lies between MIN_NOISE and MAX_NOISE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cbgen.engine.sampling.noise import (
    MAX_NOISE,
    MIN_NOISE,
    add_noise_to_all,
    add_noise_to_few,
    row_keys,
)
from cbgen.engine.sampling.processors import LogitsProcessors
from cbgen.engine.sampling.scores import Logits, Scores, token_logprobs
from cbgen.engine.sizing import SAMPLER_CHUNK
from cbgen.engine.step import AdmittedRow, SampledTokens, ScheduledRequest, StepResult

_ALL_TOKENS = 2**31
"""More than any vocabulary has; a larger top_k may not fit into 64 bits."""
_LOGPROBS = {None: 0, "raw": 1, "processed": 2}


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of all rows, or of those of one step, on the host; each tensor is [rows]."""

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
    logprobs: torch.Tensor
    """int64: which log-probabilities are wanted, as `_LOGPROBS` numbers them."""

    def select(self, index: torch.Tensor) -> SamplingRows:
        """Return the rows at `index` [k] int64."""
        return SamplingRows(*(getattr(self, name)[index] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """What a step drew, on the device: a launched step, whose `result` waits for it."""

    token_ids: torch.Tensor
    """[rows] int64; without meaning where the logits were not numbers."""
    answers: torch.Tensor
    """The same, with -1 where the logits were not numbers: all that the host must know of them."""
    logprobs: torch.Tensor | None = None
    """[rows] float32; without meaning for rows that did not ask."""
    asking: Sequence[int] = ()
    """The rows that asked for log-probabilities."""

    def result(self) -> StepResult:
        """Wait for the step and return what each row got."""
        logprobs: dict[int, tuple[float]] = {}
        if self.asking and self.logprobs is not None:
            values = self.logprobs.tolist()
            logprobs = {row: (values[row],) for row in self.asking}
        return StepResult(
            tuple(
                SampledTokens((token_id,), logprobs.get(row, ()))
                if token_id >= 0
                else SampledTokens((), (), is_finite=False)
                for row, token_id in enumerate(self.answers.tolist())
            )
        )


_NONE = torch.empty(0, dtype=torch.long)
NOTHING_DRAWN = DrawnTokens(_NONE, _NONE)
"""Of a step in which no row samples."""


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
        self._rows = SamplingRows(
            rows=torch.arange(num_rows),
            temperature=torch.zeros(num_rows, dtype=torch.float32),
            top_k=torch.zeros(num_rows, dtype=torch.long),
            top_p=torch.ones(num_rows, dtype=torch.float64),
            min_p=torch.zeros(num_rows, dtype=torch.float64),
            seed=torch.zeros(num_rows, dtype=torch.long),
            positions=torch.zeros(num_rows, dtype=torch.long),
            has_processors=torch.zeros(num_rows, dtype=torch.bool),
            logprobs=torch.zeros(num_rows, dtype=torch.long),
        )
        self._needs_logits = [False] * num_rows
        self._processors = LogitsProcessors(num_rows, logits_size, device)

    def admit(self, admitted: Sequence[AdmittedRow]) -> None:
        """Take the parameters of newly admitted requests."""
        rows = self._rows
        for item in admitted:
            row, params = item.row, item.params
            rows.temperature[row] = params.temperature
            rows.top_k[row] = min(params.top_k, _ALL_TOKENS)
            rows.top_p[row] = params.top_p
            rows.min_p[row] = params.min_p
            rows.seed[row] = params.seed
            rows.logprobs[row] = _LOGPROBS[params.logprobs]
            has_processors = self._processors.admit(item)
            rows.has_processors[row] = has_processors
            self._needs_logits[row] = (
                params.temperature > 0 or params.logprobs is not None or has_processors
            )

    def draw(self, scores: Scores, sampled: Sequence[ScheduledRequest]) -> DrawnTokens:
        """Draw a token for each request that samples, without waiting for the device."""
        rows = [item.row for item in sampled]
        if not any(self._needs_logits[row] for row in rows):
            best, token_ids = scores.best()
            return DrawnTokens(token_ids, _answers(best, token_ids))
        positions = torch.tensor([item.start + item.num_tokens for item in sampled])
        step_rows = replace(self._rows.select(torch.tensor(rows)), positions=positions)
        drawn = sample(scores.logits(), step_rows, self._processors)
        self._processors.append(rows, drawn.token_ids)
        return drawn


def sample(
    logits: torch.Tensor, rows: SamplingRows, processors: LogitsProcessors | None = None
) -> DrawnTokens:
    """Draw one token a row, and take the log-probabilities that are asked for.

    Args:
        logits: [rows, vocab], any float dtype; not changed.
        rows: parameters of each row.
        processors: change the logits of the rows that have some.
    """
    best, token_ids = Logits(logits).best()
    asks = rows.logprobs > 0
    asking_rows = torch.nonzero(asks).flatten().tolist()
    logprobs = torch.zeros(len(logits) if asking_rows else 0, device=logits.device)
    is_noisy = rows.temperature > 0
    is_processed = rows.has_processors & ~is_noisy
    for wanted in (is_noisy, is_processed):
        for places in _chunks(wanted, logits.shape[-1]):
            index, some = _to(logits.device, places), rows.select(places)
            scores = logits[index]
            if processors is not None and bool(some.has_processors.any()):
                scores = processors.process(scores, some.rows.tolist())
            if wanted is is_noisy:
                scores, threshold = _filtered(scores, some)
                token_ids[index] = _best_with_noise(scores, threshold, some)
            else:
                threshold = torch.full((len(some.rows),), float("-inf"), device=logits.device)
                token_ids[index] = Logits(scores).best()[1]
            asking = torch.nonzero(some.logprobs == _LOGPROBS["processed"]).flatten()
            if len(asking):
                index, own = _to(logits.device, places[asking]), _to(logits.device, asking)
                scores = scores[own]
                scores = scores.masked_fill(scores < threshold[own][:, None], float("-inf"))
                logprobs[index] = token_logprobs(scores, token_ids[index])
    is_raw = asks & ((rows.logprobs == _LOGPROBS["raw"]) | ~(is_noisy | is_processed))
    if bool(is_raw.any()):
        index = _to(logits.device, torch.nonzero(is_raw).flatten())
        logprobs[index] = token_logprobs(logits[index], token_ids[index])
    return DrawnTokens(token_ids, _answers(best, token_ids), logprobs, asking_rows)


def _answers(best: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return torch.where(best.isfinite(), token_ids, -1)


def _chunks(wanted: torch.Tensor, vocab: int) -> Sequence[torch.Tensor]:
    """Return the places of wanted rows, as many at a time as are worked on together."""
    places = torch.nonzero(wanted).flatten()
    return torch.split(places, max(1, SAMPLER_CHUNK // vocab)) if len(places) else ()


def _best_with_noise(
    scores: torch.Tensor, threshold: torch.Tensor, rows: SamplingRows
) -> torch.Tensor:
    threshold = torch.maximum(threshold, scores.amax(dim=-1) - (MAX_NOISE - MIN_NOISE))
    device = scores.device
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
