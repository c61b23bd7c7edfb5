"""From a ScheduledBatch to tensors: the persistent rows, and what a step gathers from them.

    ScheduledBatch (row numbers, starts, counts) -> Rows.gather -> StepInputs (packed tensors)

A row holds the token ids of its request, its block table and the token sampled last, which stays on
the device: a decoding request's next input is read from there, so the host need not know it. Every
step gets tensors of its own, so two steps can be in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from cbgen.engine.attention.metadata import AttentionMetadata
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
    attention: AttentionMetadata


class Rows:
    """Owns the persistent rows on the device; one request a row from admission to finish."""

    def __init__(
        self, *, num_rows: int, max_blocks: int, page_size: int, device: torch.device
    ) -> None:
        self._page_size = page_size
        self._device = device
        self._known_ids: list[torch.Tensor] = [torch.empty(0, dtype=torch.long)] * num_rows
        self._last_token = torch.zeros(num_rows, dtype=torch.long, device=device)
        # The blocks of a row while they lie side by side, else None.
        self._runs: list[range | None] = [None] * num_rows
        # Entries that were never written are never read, so the memory is not filled.
        self._block_tables = torch.empty(num_rows, max_blocks, dtype=torch.long, device=device)

    def admit(self, admitted: Sequence[AdmittedRow]) -> None:
        """Take the token ids of newly admitted requests."""
        for item in admitted:
            self._known_ids[item.row] = torch.tensor(item.token_ids, dtype=torch.long)

    def extend_block_tables(self, new_blocks: Sequence[NewBlocks]) -> None:
        """Append blocks to block tables."""
        for row, first, block_ids in new_blocks:
            run = self._runs[row] if first else range(block_ids[0], block_ids[0])
            self._runs[row] = _extended(run, block_ids)
            blocks = torch.tensor(block_ids, dtype=torch.long)
            self._block_tables[row, first : first + len(block_ids)] = blocks.to(self._device)

    def store_sampled(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Remember each row's newest token: rows [s] int64, token_ids [s] int64, on the device."""
        self._last_token[rows] = token_ids

    def gather(self, batch: ScheduledBatch) -> StepInputs:
        """Build the tensors of one step; draft tokens are not run by this version."""
        requests = batch.requests
        rows = self._to_device([item.row for item in requests])
        starts = self._to_device([item.start for item in requests])
        counts = self._to_device([item.num_tokens for item in requests])
        query_starts = [0, *accumulate(item.num_tokens for item in requests)]
        begins = self._to_device(query_starts[:-1])

        index = torch.arange(len(requests), device=self._device)
        index = index.repeat_interleave(counts, output_size=batch.num_tokens)  # [T] -> request
        positions = torch.arange(batch.num_tokens, device=self._device) + (starts - begins)[index]
        key_lens = [item.start + item.num_tokens for item in requests]
        width = -(-max(key_lens) // self._page_size)
        block_tables = self._block_tables[:, :width][rows]  # [n, width]
        blocks = block_tables[index, positions // self._page_size]
        return StepInputs(
            token_ids=self._token_ids(requests, rows[index], query_starts)[None],
            position_ids=positions[None],
            logit_indices=self._to_device(_logit_indices(requests, query_starts)),
            attention=AttentionMetadata(
                query_starts=query_starts,
                key_lens=key_lens,
                block_tables=block_tables,
                slot_mapping=blocks * self._page_size + positions % self._page_size,
                page_size=self._page_size,
                key_blocks=[
                    self._key_blocks(item.row, table, length)
                    for item, table, length in zip(
                        requests, block_tables.unbind(0), key_lens, strict=True
                    )
                ],
            ),
        )

    def _key_blocks(self, row: int, table: torch.Tensor, length: int) -> slice | torch.Tensor:
        """Return the blocks of a row's first `length` tokens; a slice if they lie side by side.

        A slice makes the gathered pages a view, where an index tensor makes them a copy.
        """
        count = -(-length // self._page_size)
        run = self._runs[row]
        return table[:count] if run is None else slice(run.start, run.start + count)

    def _to_device(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)

    def _token_ids(
        self, requests: Sequence[ScheduledRequest], rows: torch.Tensor, query_starts: list[int]
    ) -> torch.Tensor:
        """[T]: the token sampled last, or the known ids of requests that still have some."""
        token_ids = self._last_token[rows]
        for item, begin in zip(requests, query_starts[:-1], strict=True):
            known = self._known_ids[item.row]
            if item.start < len(known):
                chunk = known[item.start : item.start + item.num_tokens]
                token_ids[begin : begin + item.num_tokens] = chunk.to(self._device)
        return token_ids


def _logit_indices(requests: Sequence[ScheduledRequest], query_starts: list[int]) -> list[int]:
    ends = query_starts[1:]
    return [
        end - item.num_logits + offset
        for item, end in zip(requests, ends, strict=True)
        for offset in range(item.num_logits)
    ]


def _extended(run: range | None, block_ids: Sequence[int]) -> range | None:
    """Return the run with blocks appended, None if they do not lie side by side."""
    if run is None:
        return None
    stop = run.stop + len(block_ids)
    return range(run.start, stop) if tuple(range(run.stop, stop)) == tuple(block_ids) else None
