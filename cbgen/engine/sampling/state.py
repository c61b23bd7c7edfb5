"""Sampling parameters of the persistent rows, kept as host tensors so that a step only gathers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from cbgen.engine.sampling.sampler import SamplingRows
from cbgen.engine.step import AdmittedRow, ScheduledRequest

_ALL_TOKENS = 2**31
"""More than any vocabulary has; a larger top_k may not fit into 64 bits."""


class SamplingState:
    """Owns one entry a row; written at admission, read by every step that samples the row."""

    def __init__(self, num_rows: int) -> None:
        self._temperature = torch.zeros(num_rows, dtype=torch.float32)
        self._top_k = torch.zeros(num_rows, dtype=torch.long)
        self._top_p = torch.ones(num_rows, dtype=torch.float64)
        self._min_p = torch.zeros(num_rows, dtype=torch.float64)
        self._seed = torch.zeros(num_rows, dtype=torch.long)
        self._logprobs: list[Literal["raw", "processed"] | None] = [None] * num_rows
        self._needs_logits = [False] * num_rows

    def admit(self, admitted: Sequence[AdmittedRow]) -> None:
        """Take the parameters of newly admitted requests."""
        for row, _, params in admitted:
            self._temperature[row] = params.temperature
            self._top_k[row] = min(params.top_k, _ALL_TOKENS)
            self._top_p[row] = params.top_p
            self._min_p[row] = params.min_p
            self._seed[row] = params.seed
            self._logprobs[row] = params.logprobs
            self._needs_logits[row] = params.temperature > 0 or params.logprobs is not None

    def gather(self, sampled: Sequence[ScheduledRequest]) -> SamplingRows:
        """Return the parameters of the requests that sample in this step, in their order."""
        rows = torch.tensor([item.row for item in sampled])
        return SamplingRows(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seed=self._seed[rows],
            positions=torch.tensor([item.start + item.num_tokens for item in sampled]),
        )

    def needs_logits(self, sampled: Sequence[ScheduledRequest]) -> bool:
        """Return whether some of these requests want more than the best token."""
        return any(self._needs_logits[item.row] for item in sampled)

    def logprobs(self, row: int) -> Literal["raw", "processed"] | None:
        """Return which log-probabilities the request of a row asked for."""
        return self._logprobs[row]
