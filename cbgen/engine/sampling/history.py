"""The tokens that a row has had so far, for the logits processors that look back.

A row has a history only while its request asks for one. The last token of a history may be known
on the device alone: it is appended there, and the host counts along without waiting for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cbgen.engine.step import AdmittedRow


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


class TokenHistory:
    """Owns the histories, one slot each; memory grows with the rows that ask and their lengths.

    A slot is free again when its row is taken by the next request. The memory is given back when no
    row has a slot.

    Args:
        logits_size: columns of the logits; tokens beyond have no score and are left out.
        device: where tokens are drawn.
    """

    def __init__(self, logits_size: int, device: torch.device) -> None:
        self._logits_size = logits_size
        self._device = device
        self._slots: dict[int, int] = {}  # row -> slot
        self._free_slots: list[int] = []
        self._num_prompt: list[int] = []  # of each slot
        self._num_tokens: list[int] = []
        self._token_ids = self._empty(0, 0)  # [slots, tokens]

    @property
    def num_bytes(self) -> int:
        """Memory that the histories take on the device."""
        return self._token_ids.nbytes

    def admit(self, item: AdmittedRow) -> None:
        """Begin the history of a row anew, with the tokens that are known."""
        self.forget(item.row)
        prompt = [token for token in item.prompt_ids if token < self._logits_size]
        known = prompt + [token for token in item.generated_tokens if token < self._logits_size]
        if not self._free_slots:
            self._grow(max(4, 2 * len(self._num_tokens)), self._token_ids.shape[1])
        if len(known) > self._token_ids.shape[1]:
            self._grow(len(self._num_tokens), 2 * len(known))
        slot = self._free_slots.pop()
        self._slots[item.row] = slot
        self._num_prompt[slot] = len(prompt)
        self._num_tokens[slot] = len(known)
        self._token_ids[slot] = known[0] if known else 0
        self._token_ids[slot, : len(known)] = self._to_device(known)

    def forget(self, row: int) -> None:
        """Free the slot of a row; one without a history is left alone."""
        slot = self._slots.pop(row, None)
        if slot is None:
            return
        self._free_slots.append(slot)
        if not self._slots:
            self._free_slots, self._num_prompt, self._num_tokens = [], [], []
            self._token_ids = self._empty(0, 0)

    def append(self, rows: Sequence[int], token_ids: torch.Tensor) -> None:
        """Append the newest token of each row that has a history: token_ids [rows] int64."""
        if not self._slots:
            return
        places = [place for place, row in enumerate(rows) if row in self._slots]
        if not places:
            return
        slots = [self._slots[rows[place]] for place in places]
        ends = [self._num_tokens[slot] for slot in slots]
        if max(ends) >= self._token_ids.shape[1]:
            self._grow(len(self._num_tokens), 2 * (max(ends) + 1))
        index, slot_index, end_index = self._to_device(places, slots, ends)
        self._token_ids[slot_index, end_index] = token_ids[index]
        for slot in slots:
            self._num_tokens[slot] += 1

    def gather(self, rows: Sequence[int]) -> RowTokens:
        """Return the histories of rows, all of which have one."""
        slots = [self._slots[row] for row in rows]
        num_prompt = [self._num_prompt[slot] for slot in slots]
        num_tokens = [self._num_tokens[slot] for slot in slots]
        index, prompts, tokens = self._to_device(slots, num_prompt, num_tokens)
        return RowTokens(self._token_ids[:, : max(num_tokens)][index], prompts, tokens)

    def _grow(self, num_slots: int, width: int) -> None:
        """Make room for so many slots of so many tokens."""
        old = self._token_ids
        grown = self._empty(num_slots, width)
        if old.shape[1]:
            grown[: old.shape[0]] = old[:, :1]
            grown[: old.shape[0], : old.shape[1]] = old
        self._token_ids = grown
        new = range(len(self._num_tokens), num_slots)
        self._free_slots += new
        self._num_prompt += [0] * len(new)
        self._num_tokens += [0] * len(new)

    def _empty(self, num_slots: int, width: int) -> torch.Tensor:
        return torch.empty(num_slots, width, dtype=torch.long, device=self._device)

    def _to_device(self, *lists: Sequence[int]) -> torch.Tensor:
        """Return lists of one length as int64 on the device, [lists, length]; a single one flat."""
        values = torch.tensor(lists, dtype=torch.long)
        values = values[0] if len(lists) == 1 else values
        return values.to(self._device, non_blocking=True)
