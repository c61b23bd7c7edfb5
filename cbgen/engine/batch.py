"""From a ScheduledBatch to tensors: the persistent rows, and what a step gathers from them.

    ScheduledBatch (row numbers, starts, counts) -> Rows.gather -> StepInputs (packed tensors)

A row holds the token ids of its request, its block tables and the token sampled last, which stays
on the device: a decoding request's next input is read from there, so the host need not know it.
Every step gets tensors of its own, so two steps can be in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from cbgen.engine.attention.metadata import AttentionMetadata
from cbgen.engine.cache.shape import CacheShape
from cbgen.engine.step import AdmittedRow, NewBlocks, ScheduledBatch, ScheduledRequest


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one forward pass reads; T tokens, s logit rows."""

    token_ids: torch.Tensor
    """[1, T] int64."""
    position_ids: torch.Tensor
    """[1, T] int64."""
    logit_indices: torch.Tensor
    """[s] int64: tokens whose logits are wanted."""
    sampled_rows: torch.Tensor
    """[requests that sample] int64, on the device: their rows, in order."""
    attention: tuple[AttentionMetadata, ...]
    """One entry for each layer group."""


class _Run(NamedTuple):
    """The last blocks of a block table, as far as they lie side by side."""

    start: int
    """Logical block from which on they do."""
    stop: int
    """End of the block table."""
    offset: int
    """Block id minus logical block, the same for all of them."""


_NO_RUN = _Run(0, 0, 0)


class Rows:
    """Owns the persistent rows on the device; one request a row from admission to finish."""

    def __init__(
        self, cache: CacheShape, num_rows: int, *, table_blocks: int, device: torch.device
    ) -> None:
        """Make empty rows.

        Args:
            cache: pages and layer groups.
            num_rows: requests that may be admitted at the same time.
            table_blocks: logical blocks of the longest request.
            device: where steps run.
        """
        self._page_size = cache.page_size
        self._device = device
        self._spans = cache.spans
        self._known_ids: list[torch.Tensor] = [torch.empty(0, dtype=torch.long)] * num_rows
        self._num_known = [0] * num_rows
        self._last_token = torch.zeros(num_rows, dtype=torch.long, device=device)
        self._runs = [[_NO_RUN] * num_rows for _ in self._spans]
        # [groups, rows, table_blocks]. Entries that were never written are never read, so the
        # memory is not filled.
        self._block_tables = torch.empty(
            len(self._spans), num_rows, table_blocks, dtype=torch.long, device=device
        )

    def admit(self, admitted: Sequence[AdmittedRow]) -> None:
        """Take the token ids of newly admitted requests; their block tables are empty again."""
        for item in admitted:
            known_ids = [*item.prompt_ids, *item.generated_tokens]
            self._known_ids[item.row] = torch.tensor(known_ids, dtype=torch.long)
            self._num_known[item.row] = len(known_ids)
            for runs in self._runs:
                runs[item.row] = _NO_RUN

    def extend_block_tables(self, new_blocks: Sequence[NewBlocks]) -> None:
        """Write blocks into block tables."""
        if not new_blocks:
            return
        _, num_rows, width = self._block_tables.shape
        entries: dict[int, int] = {}  # place in the flat tables -> block, the last one given to it
        for row, group, first, block_ids in new_blocks:
            self._runs[group][row] = _extended(self._runs[group][row], first, block_ids)
            place = (group * num_rows + row) * width + first
            entries.update(zip(range(place, place + len(block_ids)), block_ids, strict=True))
        places, blocks = self._to_device(list(entries), list(entries.values()))
        self._block_tables.view(-1).index_copy_(0, places, blocks)

    def store_sampled(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Remember each row's newest token: rows [s] int64, token_ids [s] int64, on the device."""
        self._last_token[rows] = token_ids

    def gather(self, batch: ScheduledBatch) -> StepInputs:
        """Build the tensors of one step; draft tokens are not run by this version."""
        requests = batch.requests
        counts = [item.num_tokens for item in requests]
        query_starts = [0, *accumulate(counts)]
        starts = [item.start for item in requests]
        # What a request's first position is ahead of its first token's place in the step.
        shifts = [start - begin for start, begin in zip(starts, query_starts, strict=False)]
        rows, shift, repeats, logit_indices, sampled_rows = self._to_device(
            [item.row for item in requests],
            shifts,
            counts,
            _logit_indices(requests, query_starts),
            [item.row for item in requests if item.num_samples],
        )
        token_rows = rows
        if batch.num_tokens != len(requests):
            token_rows, shift = (
                each.repeat_interleave(repeats, output_size=batch.num_tokens)
                for each in (rows, shift)
            )
        positions = torch.arange(batch.num_tokens, device=self._device) + shift
        return StepInputs(
            token_ids=self._token_ids(requests, token_rows, query_starts)[None],
            position_ids=positions[None],
            logit_indices=logit_indices,
            sampled_rows=sampled_rows,
            attention=self._attention(requests, query_starts, rows, token_rows, positions),
        )

    def _attention(
        self,
        requests: Sequence[ScheduledRequest],
        query_starts: list[int],
        rows: torch.Tensor,
        token_rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[AttentionMetadata, ...]:
        """Return the places of the step's tokens in each group: rows [n], the others [T]."""
        size = self._page_size
        key_lens = [item.start + item.num_tokens for item in requests]
        stops = [-(-length // size) for length in key_lens]
        blocks = self._block_tables[:, token_rows, positions // size]  # [groups, T]
        slots = blocks * size + positions % size
        tables = self._block_tables[:, rows, : max(stops)]  # [groups, n, blocks of the longest]
        found = []
        for group, span in enumerate(self._spans):
            first_keys = [0] * len(requests)
            if not span.is_full:
                first_keys = [span.first_key(item.start) for item in requests]
            firsts = [key // size for key in first_keys]
            found.append(
                AttentionMetadata(
                    span=span,
                    query_starts=query_starts,
                    key_lens=key_lens,
                    block_tables=tables[group],
                    slot_mapping=slots[group],
                    first_keys=first_keys,
                    key_blocks=self._key_blocks(group, requests, tables[group], firsts, stops),
                )
            )
        return tuple(found)

    def _key_blocks(
        self,
        group: int,
        requests: Sequence[ScheduledRequest],
        tables: torch.Tensor,
        firsts: Sequence[int],
        stops: Sequence[int],
    ) -> list[slice | torch.Tensor]:
        """Return blocks [first, stop) of each request's table, a slice if they lie side by side.

        A slice makes the gathered pages a view, where an index tensor makes them a copy.
        """
        runs = [self._runs[group][item.row] for item in requests]
        if all(run.start <= first for run, first in zip(runs, firsts, strict=True)):
            return [
                slice(run.offset + first, run.offset + stop)
                for run, first, stop in zip(runs, firsts, stops, strict=True)
            ]
        width = tables.shape[1]
        # One split is cheaper than a slice a request; every other piece is what nobody needs.
        pieces = torch.split(
            tables.flatten(),
            [
                size
                for first, stop in zip(firsts, stops, strict=True)
                for size in (first, stop - first, width - stop)
            ],
        )
        return [
            slice(run.offset + first, run.offset + stop) if run.start <= first else piece
            for run, first, stop, piece in zip(runs, firsts, stops, pieces[1::3], strict=True)
        ]

    def _token_ids(
        self, requests: Sequence[ScheduledRequest], rows: torch.Tensor, query_starts: list[int]
    ) -> torch.Tensor:
        """[T]: the token sampled last, or the known ids of requests that still have some."""
        known = [
            (begin, self._known_ids[item.row][item.start : item.start + item.num_tokens])
            for item, begin in zip(requests, query_starts, strict=False)
            if item.start < self._num_known[item.row]
        ]
        if not known:
            return self._last_token[rows]
        token_ids = torch.full((len(rows),), -1, dtype=torch.long)
        for begin, chunk in known:
            token_ids[begin : begin + len(chunk)] = chunk
        token_ids = token_ids.to(self._device, non_blocking=True)
        return torch.where(token_ids < 0, self._last_token[rows], token_ids)

    def _to_device(self, *lists: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Return each list as int64 on the device; they cross in one transfer."""
        values = torch.tensor([*chain(*lists)], dtype=torch.long)
        values = values.to(self._device, non_blocking=True)
        return torch.split(values, [len(each) for each in lists])


def _logit_indices(requests: Sequence[ScheduledRequest], query_starts: list[int]) -> list[int]:
    ends = query_starts[1:]
    return [
        end - item.num_logits + offset
        for item, end in zip(requests, ends, strict=True)
        for offset in range(item.num_logits)
    ]


def _extended(run: _Run, first: int, block_ids: Sequence[int]) -> _Run:
    """Return the run at the end of a block table after blocks were written from `first` on."""
    if not block_ids:
        return run
    stop = first + len(block_ids)
    if stop < run.stop:
        # Blocks before the end were replaced; those behind them lie as they did.
        return run._replace(start=max(run.start, stop))
    offset = block_ids[-1] - (stop - 1)
    start = stop - 1
    while start > first and block_ids[start - 1 - first] == offset + start - 1:
        start -= 1
    if start == first and offset == run.offset:
        start = min(start, run.start)  # blocks in between that nobody named are never read
    return _Run(start, stop, offset)
