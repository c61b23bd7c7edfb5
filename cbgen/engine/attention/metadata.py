"""What attention needs to know of one step. Built once a step by `batch`, read by every layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from cbgen.engine.cache.groups import AttentionSpan


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Places of the step's tokens in the pages of one layer group.

    n requests, T tokens, packed without padding. The lists are the host's copy, for backends that
    loop over requests.
    """

    span: AttentionSpan
    """Which keys a query of these layers sees."""
    query_starts: list[int]
    """[n + 1] where each request's tokens begin among the T tokens."""
    key_lens: list[int]
    """[n] tokens of each request once this step's are written: its keys end before this position.
    """
    block_tables: torch.Tensor
    """[n, blocks of the longest] int64, on the device; what is beyond a request's own blocks, or
    before those that its queries see, is undefined."""
    slot_mapping: torch.Tensor
    """[T] int64, on the device: place of each new token in the flat cache."""
    first_keys: list[int]
    """[n] position of the earliest key that any query of the request sees.

    From here to the end every key is seen by some query. Those before may be anybody's, so they
    must not even meet a mask: what is not a number would come through."""
    key_blocks: list[slice | torch.Tensor]
    """[n] the blocks of each request from the one of `first_keys` to `key_lens`: int64 on the
    device, or a slice where they lie side by side."""
    masks: dict[int, torch.Tensor] = field(default_factory=dict)
    """Those that `mask` has made: all layers of the group share them in a step."""

    @property
    def num_requests(self) -> int:
        """Requests of the step."""
        return len(self.key_lens)

    def mask(self, index: int, device: torch.device) -> torch.Tensor:
        """Return which keys from `first_keys` on each query of a request sees: [queries, keys]."""
        if index not in self.masks:
            query_len = self.query_starts[index + 1] - self.query_starts[index]
            self.masks[index] = causal_mask(
                query_len, self.key_lens[index], self.span, self.first_keys[index], device
            )
        return self.masks[index]


def causal_mask(
    query_len: int, key_len: int, span: AttentionSpan, key_start: int, device: torch.device
) -> torch.Tensor:
    """Return which keys each query sees: [query_len, key_len - key_start] bool.

    Args:
        query_len: number of queries; they are the last tokens of the request.
        key_len: tokens of the request.
        span: which of the earlier keys a query sees.
        key_start: position of the first key.
        device: where the mask is made.
    """
    queries = torch.arange(key_len - query_len, key_len, device=device)[:, None]
    keys = torch.arange(key_start, key_len, device=device)[None, :]
    visible = keys <= queries
    if span.window is not None:
        visible &= keys > queries - span.window
    if span.chunk is not None:
        visible &= keys >= queries // span.chunk * span.chunk
    return visible
