"""Logits processors: what changes the scores of a row before temperature and filters.

    logits [rows, vocab] -> repetition penalty -> ... -> temperature, top_k, top_p, min_p -> token

A new penalty is a field of `SamplingParams`, a subclass of `LogitsProcessor` here, and its place in
`PROCESSORS`. Scores are float32 and a row's outcome depends on the row alone. A processor that no
row of a step uses is not run, and a row that uses none keeps its logits bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from cbgen.engine.sampling.params import SamplingParams
from cbgen.engine.step import AdmittedRow

MAX_PENALTY = 1e25
"""Scores that were multiplied or divided by more would not be numbers in float32."""


@dataclass(frozen=True, slots=True)
class RowTokens:
    """The histories of k rows, side by side; L tokens is the longest one."""

    token_ids: torch.Tensor
    """[k, L] int64: prompt, then answer; a shorter history ends in repetitions of its first id."""
    num_prompt: torch.Tensor
    """[k] int64: how many of them are the prompt's."""
    num_tokens: torch.Tensor
    """[k] int64: how many of them are prompt and answer."""

    def is_generated(self) -> torch.Tensor:
        """Return which of `token_ids` are the answer's: [k, L] bool."""
        places = torch.arange(self.token_ids.shape[1], device=self.token_ids.device)
        return (places >= self.num_prompt[:, None]) & (places < self.num_tokens[:, None])


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
    """Owns the processors, the numbers of the persistent rows that use them, and their histories.

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
        self._processors: list[tuple[LogitsProcessor, dict[int, float]]] = [
            (kind(), {}) for kind in kinds
        ]
        self._history = TokenHistory(num_rows, logits_size, device)

    def admit(self, item: AdmittedRow) -> bool:
        """Take the numbers of a newly admitted request; return whether it uses a processor."""
        is_user = False
        for processor, numbers in self._processors:
            numbers.pop(item.row, None)
            number = processor.value(item.params)
            if number != processor.off:
                numbers[item.row] = number
                is_user = True
        if is_user:
            self._history.admit(item)
        else:
            self._history.forget(item.row)
        return is_user

    def append(self, rows: Sequence[int], token_ids: torch.Tensor) -> None:
        """Take the newest tokens of persistent rows, on the device: token_ids [rows] int64."""
        self._history.append(rows, token_ids)

    def process(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return what the processors make of logits.

        Args:
            logits: [k, vocab] of any float dtype; may be changed.
            rows: the k persistent rows that they belong to.
        """
        scores = logits
        for processor, numbers in self._processors:
            places = [place for place, row in enumerate(rows) if row in numbers]
            if not places:
                continue
            users = [rows[place] for place in places]
            values = torch.tensor([numbers[row] for row in users], dtype=torch.float32)
            values = values.to(logits.device, non_blocking=True)
            tokens = self._history.gather(users)
            scores = scores.float()
            if len(users) == len(rows):
                processor.process(scores, values, tokens)
            else:
                index = torch.tensor(places).to(logits.device, non_blocking=True)
                part = scores[index]
                processor.process(part, values, tokens)
                scores[index] = part
        return scores


class TokenHistory:
    """Owns the tokens of the rows that have a history, prompt and answer.

    The last token may be known on the device alone: it is appended there, and the host counts along
    without waiting for it. Memory grows with the longest history, and is given back with the last.

    Args:
        num_rows: persistent rows.
        logits_size: columns of the logits; tokens beyond have no score and are left out.
        device: where tokens are drawn.
    """

    def __init__(self, num_rows: int, logits_size: int, device: torch.device) -> None:
        self._logits_size = logits_size
        self._num_prompt: dict[int, int] = {}  # of each row that has a history
        self._num_tokens: dict[int, int] = {}
        # [rows, tokens]; behind its end a row repeats its first token.
        self._token_ids = torch.zeros(num_rows, 1, dtype=torch.long, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory that the histories take on the device."""
        return self._token_ids.nbytes

    def admit(self, item: AdmittedRow) -> None:
        """Begin the history of a row anew, with the tokens that are known."""
        known = [token for token in item.prompt_ids if token < self._logits_size]
        self._num_prompt[item.row] = len(known)
        known += [token for token in item.generated_tokens if token < self._logits_size]
        self._num_tokens[item.row] = len(known)
        self._widen(len(known))
        self._token_ids[item.row] = known[0] if known else 0
        self._token_ids[item.row, : len(known)] = self._to_device(known)[0]

    def forget(self, row: int) -> None:
        """Drop the history of a row; one without is left alone."""
        if self._num_tokens.pop(row, None) is not None and not self._num_tokens:
            self._token_ids = self._token_ids[:, :1].clone()

    def append(self, rows: Sequence[int], token_ids: torch.Tensor) -> None:
        """Append the newest token of each row that has a history: token_ids [rows] int64."""
        if not self._num_tokens:
            return
        places = [place for place, row in enumerate(rows) if row in self._num_tokens]
        if not places:
            return
        users = [rows[place] for place in places]
        ends = [self._num_tokens[row] for row in users]
        self._widen(max(ends) + 1)
        index, user_index, end_index = self._to_device(places, users, ends)
        self._token_ids[user_index, end_index] = token_ids[index]
        for row in users:
            self._num_tokens[row] += 1

    def gather(self, rows: Sequence[int]) -> RowTokens:
        """Return the histories of rows, all of which have one."""
        num_tokens = [self._num_tokens[row] for row in rows]
        index, prompts, tokens = self._to_device(
            rows, [self._num_prompt[row] for row in rows], num_tokens
        )
        return RowTokens(self._token_ids[:, : max(num_tokens)][index], prompts, tokens)

    def _widen(self, num_tokens: int) -> None:
        """Make room for a history of so many tokens."""
        old = self._token_ids
        if num_tokens > old.shape[1]:
            self._token_ids = old[:, :1].repeat(1, 2 * num_tokens)
            self._token_ids[:, : old.shape[1]] = old

    def _to_device(self, *lists: Sequence[int]) -> torch.Tensor:
        """Return lists of one length as int64 on the device: [lists, length]."""
        values = torch.tensor(lists, dtype=torch.long)
        return values.to(self._token_ids.device, non_blocking=True)
