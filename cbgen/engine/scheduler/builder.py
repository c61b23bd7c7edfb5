"""Collects what one step does, and counts down its tokens."""

from __future__ import annotations

from collections.abc import Iterable

from cbgen.engine.cache.kv_cache import Placement
from cbgen.engine.request import Request
from cbgen.engine.step import (
    AdmittedRow,
    BlockCopy,
    BlockSwap,
    NewBlocks,
    ScheduledBatch,
    ScheduledRequest,
)


class BatchBuilder:
    """One step in the making.

    Args:
        step: its number.
        max_tokens: tokens of the forward pass.

    Attributes:
        tokens_left: tokens that may still be taken.
        new_blocks: blocks that requests got for their block tables.
        swaps_out: blocks to copy to the host pool before anything else happens.
    """

    def __init__(self, step: int, max_tokens: int) -> None:
        self.step = step
        self.tokens_left = max_tokens
        self._max_tokens = max_tokens
        self._requests: list[ScheduledRequest] = []
        self._admitted: list[AdmittedRow] = []
        self.new_blocks: list[NewBlocks] = []
        self._copies: list[BlockCopy] = []
        self._swaps_in: list[BlockSwap] = []
        self.swaps_out: list[BlockSwap] = []

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far."""
        return self._max_tokens - self.tokens_left

    def decode(self, requests: Iterable[Request]) -> None:
        """Run one token of each request and sample the next one; there must be tokens left."""
        step, scheduled = self.step, self._requests
        before = len(scheduled)
        # Called for every request of every step: a named tuple's own constructor takes twice as
        # long.
        new, kind, nothing = tuple.__new__, ScheduledRequest, ()
        for request in requests:
            start = request.num_computed_tokens
            request.settled_step = step
            request.num_settled_tokens = start
            request.num_computed_tokens = start + 1
            request.num_tokens += 1
            request.num_pending_tokens += 1
            item = (request.row, request.admission, request.request_id, start, 1, 1, 1, nothing)
            scheduled.append(new(kind, item))
        self.tokens_left -= len(scheduled) - before

    def prefill(self, request: Request, num_tokens: int) -> None:
        """Run the next `num_tokens` known tokens; sample if they are the last ones."""
        start = request.num_computed_tokens
        if request.settled_step != self.step:
            request.settled_step = self.step
            request.num_settled_tokens = start
        request.num_computed_tokens = start + num_tokens
        # The last known token is among these exactly when the next one can be sampled.
        num_samples = int(request.num_computed_tokens == request.num_tokens)
        request.num_tokens += num_samples
        request.num_pending_tokens += num_samples
        self.tokens_left -= num_tokens
        self._requests.append(
            ScheduledRequest(
                row=request.row,
                admission=request.admission,
                request_id=request.request_id,
                start=start,
                num_tokens=num_tokens,
                num_logits=num_samples,
                num_samples=num_samples,
            )
        )

    def admit(self, request: Request, placement: Placement) -> None:
        """Hand a newly admitted request to the runner."""
        generated_tokens = tuple(request.generated_tokens)
        self._admitted.append(
            AdmittedRow(request.row, request.prompt_ids, request.params, generated_tokens)
        )
        self.new_blocks += placement.blocks
        self._copies += placement.copies
        self._swaps_in += placement.swaps_in

    def build(self) -> ScheduledBatch:
        """Return the step."""
        return ScheduledBatch(
            step=self.step,
            admitted=tuple(self._admitted),
            swaps_out=tuple(self.swaps_out),
            block_copies=tuple(self._copies),
            swaps_in=tuple(self._swaps_in),
            new_blocks=tuple(self.new_blocks),
            requests=tuple(self._requests),
            num_tokens=self.num_tokens,
        )
