"""Logits processors: what changes the scores of a row before temperature and filters.

    logits [rows, vocab] -> repetition penalty -> ... -> temperature, top_k, top_p, min_p -> token

A new penalty is a field of `SamplingParams`, a subclass of `LogitsProcessor` here, and its place in
`PROCESSORS`. Scores are float32 and a row's outcome depends on the row alone. A processor that no
row of a step uses is not run, and a row that uses none keeps its logits bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from cbgen.engine.sampling.history import RowTokens, TokenHistory
from cbgen.engine.sampling.params import SamplingParams
from cbgen.engine.step import AdmittedRow

MAX_PENALTY = 1e25
"""Scores that were multiplied or divided by more would not be numbers in float32."""


class LogitsProcessor(ABC):
    """Changes the scores of the rows that use it, by one number a row."""

    off: ClassVar[float]
    """The number of a row that does not use it."""

    @abstractmethod
    def value(self, params: SamplingParams) -> float:
        """Return the number of a request."""

    @abstractmethod
    def process(self, scores: torch.Tensor, values: torch.Tensor, tokens: RowTokens) -> None:
        """Change scores in place.

        Args:
            scores: [k, vocab] float32, of the rows that use this processor.
            values: [k] float32, their numbers.
            tokens: their prompts and answers so far.
        """


class RepetitionPenalty(LogitsProcessor):
    """Divides positive and multiplies negative scores of all tokens of prompt and answer."""

    off = 1.0

    def value(self, params: SamplingParams) -> float:
        """Return the penalty of a request, within the bounds that keep scores finite."""
        return min(max(params.repetition_penalty, 1 / MAX_PENALTY), MAX_PENALTY)

    def process(self, scores: torch.Tensor, values: torch.Tensor, tokens: RowTokens) -> None:
        """See `LogitsProcessor`; a token that occurs several times is penalized once."""
        penalty = values[:, None]
        seen = scores.gather(1, tokens.token_ids)
        seen = torch.where(seen < 0, seen * penalty, seen / penalty)
        scores.scatter_(1, tokens.token_ids, seen)


PROCESSORS: tuple[type[LogitsProcessor], ...] = (RepetitionPenalty,)
"""All of them, in the order in which they run: that of `transformers.generation`."""


class LogitsProcessors:
    """Owns the processors, their numbers for each persistent row, and the rows' histories.

    Args:
        num_rows: persistent rows.
        logits_size: columns of the logits.
        device: where tokens are drawn.
        kinds: the processors, in their order.
    """

    def __init__(
        self,
        num_rows: int,
        logits_size: int,
        device: torch.device,
        kinds: Sequence[type[LogitsProcessor]] = PROCESSORS,
    ) -> None:
        self._processors = [
            (kind(), torch.full((num_rows,), kind.off, dtype=torch.float32)) for kind in kinds
        ]
        self._users: set[int] = set()  # rows with any number that is not off
        self._history = TokenHistory(logits_size, device)

    def admit(self, item: AdmittedRow) -> bool:
        """Take the numbers of a newly admitted request; return whether it uses a processor."""
        numbers = [processor.value(item.params) for processor, _ in self._processors]
        is_user = any(
            number != processor.off
            for number, (processor, _) in zip(numbers, self._processors, strict=True)
        )
        if is_user or item.row in self._users:
            for number, (_, values) in zip(numbers, self._processors, strict=True):
                values[item.row] = number
        if is_user:
            self._users.add(item.row)
            self._history.admit(item)
        else:
            self._users.discard(item.row)
            self._history.forget(item.row)
        return is_user

    def append(self, rows: Sequence[int], token_ids: torch.Tensor) -> None:
        """Take the newest tokens of persistent rows, on the device: token_ids [rows] int64."""
        self._history.append(rows, token_ids)

    def process(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return what the processors make of logits.

        Args:
            logits: [k, vocab] of any float dtype; may be changed.
            rows: [k] int64 on the host: the persistent rows that they belong to.
        """
        scores = logits
        for processor, numbers in self._processors:
            values = numbers[rows]
            users = torch.nonzero(values != processor.off).flatten()
            if len(users) == 0:
                continue
            scores = scores.float()
            tokens = self._history.gather(rows[users].tolist())
            values = values[users].to(logits.device, non_blocking=True)
            if len(users) == len(rows):
                processor.process(scores, values, tokens)
            else:
                index = users.to(logits.device, non_blocking=True)
                part = scores[index]
                processor.process(part, values, tokens)
                scores[index] = part
        return scores
