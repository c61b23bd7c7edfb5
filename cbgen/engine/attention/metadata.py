"""What attention needs to know of one step. Built once a step by `batch`, read by every layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Places of the step's tokens in the paged cache; n requests, T tokens, packed without padding.

    The lists are the host's copy, for backends that loop over requests.
    """

    query_starts: list[int]
    """[n + 1] where each request's tokens begin among the T tokens."""
    key_lens: list[int]
    """[n] tokens of each request in the cache once this step's are written."""
    block_tables: torch.Tensor
    """[n, blocks of the longest] int64, on the device;
    what is beyond a request's own is undefined."""
    slot_mapping: torch.Tensor
    """[T] int64, on the device: place of each new token in the flat cache."""
    page_size: int
    key_blocks: list[slice | torch.Tensor] = field(default_factory=list)
    """[n] the blocks of each request, cut to its length: int64 on the device, or a slice where they
    lie side by side."""
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)
    """(request, window) -> mask [query_len, key_len], shared by all layers of a step."""

    @property
    def num_requests(self) -> int:
        """Requests of the step."""
        return len(self.key_lens)

    def query_len(self, index: int) -> int:
        """Return the new tokens of a request."""
        return self.query_starts[index + 1] - self.query_starts[index]


def causal_mask(
    query_len: int, key_len: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Return which keys each query sees: [query_len, key_len] bool, queries at the end of the keys.

    A window of W shows a query its own key and the W - 1 before it, as transformers counts.
    """
    queries = torch.arange(key_len - query_len, key_len, device=device)[:, None]
    keys = torch.arange(key_len, device=device)[None, :]
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    return visible
