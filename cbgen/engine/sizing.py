"""How much memory the parts of an engine take, and how much of its cache a request takes.

Arithmetic over facts; `plan` decides with it. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from cbgen.engine.attention.backends import backend_class
from cbgen.engine.cache.groups import LayerFacts
from cbgen.engine.cache.shape import CacheShape

SAMPLER_CHUNK = 1 << 22
"""Scores that the sampler works on at once."""
_SAMPLER_BYTES = 72
"""Bytes for each of them, as measured: scores, their places, hashes and noise."""
_LOGIT_BYTES = 8
"""Bytes for each logit: the model's, and a copy for log-probabilities."""
_HIDDEN_BYTES = 64
"""Bytes for each hidden element of each token: residual, projections, and the wider inner layer."""
MOST_SCORES = 1 << 24
"""Scores of all heads that attention by request holds at once, if one query does not need more."""
_SCORE_BYTES = 12
"""Bytes for each score of each head where attention computes them all: up to three copies."""
_TABLE_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """Model and machine, in numbers."""

    device_type: str
    """cpu | cuda."""
    free_bytes: int
    """Memory that cache and buffers may come from, weights already loaded."""
    host_free_bytes: int = 0
    """Free memory of the host; ignored on a CPU, where `free_bytes` is memory of the host."""
    layers: tuple[LayerFacts, ...]
    dtype: str
    """Name of the dtype that the model computes in; keys and values have it too."""
    vocab_size: int
    logits_size: int
    hidden_size: int
    max_context: int | None
    missing_kernels: str | None = "the C++ kernels are not used"
    """Why the kernels for the CPU cannot be used; None if they can."""
    instruction_set: str | None = None
    """Which one the kernels use; None without them."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an attention backend cannot serve a model on a machine."""

    reason: str
    remedy: str
    """What a user who asked for it reads behind the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """One layer's attention in the costliest step: one request has all its queries."""

    device_type: str
    layer: LayerFacts
    itemsize: int
    """Bytes of one element of a key or value."""
    num_queries: int
    num_keys: int

    @property
    def head_dims(self) -> int:
        """Elements of a key and a value."""
        return self.layer.key_dim + self.layer.value_dim

    @property
    def num_pairs(self) -> int:
        """Queries and keys of the step that may meet."""
        return min(self.num_queries, self.num_keys) * self.num_keys

    @property
    def mask_bytes(self) -> int:
        """Bytes of masks, one for each query and key; they are kept for all requests."""
        return self.num_queries * self.num_keys

    @property
    def score_bytes(self) -> int:
        """Bytes of scores where attention by request computes them all."""
        num_heads = self.layer.num_heads
        num_scores = max(self.num_keys * num_heads, min(self.num_pairs * num_heads, MOST_SCORES))
        return num_scores * _SCORE_BYTES

    def gathered_bytes(self, num_heads: int) -> int:
        """Return the bytes of all keys and values, copied for so many heads."""
        return self.num_keys * num_heads * self.head_dims * self.itemsize


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """The bytes that an engine takes, by its sizes."""

    facts: PlanFacts
    cache: CacheShape
    """Pages, groups and dtype; how many blocks there are is not read."""
    backend: str
    """Name of the attention backend."""
    max_context: int

    def cache_bytes(self, num_blocks: int) -> int:
        """Return the bytes of so many blocks of the whole model."""
        return num_blocks * len(self.cache.groups) * self.cache.block_bytes

    def logits_bytes(self, max_requests: int) -> int:
        """Return the bytes for the logits of a step and for drawing its tokens."""
        num_scores = max_requests * self.facts.logits_size
        chunk = min(num_scores, max(SAMPLER_CHUNK, self.facts.logits_size))
        return num_scores * _LOGIT_BYTES + chunk * _SAMPLER_BYTES

    def step_bytes(self, max_batch_tokens: int, num_blocks: int) -> int:
        """Return the bytes for activations, and for the attention of the costliest layer.

        That is a step that runs the end of the longest prompt that so many blocks can store.
        """
        longest = self._longest_request(num_blocks)
        backend, attention = backend_class(self.backend), 0
        for layer in self._kinds_of_layers:
            reach = layer.span.reach
            sizes = AttentionSizes(
                device_type=self.facts.device_type,
                layer=layer,
                itemsize=self.cache.itemsize,
                num_queries=max_batch_tokens,
                num_keys=longest if reach is None else min(longest, reach - 1 + max_batch_tokens),
            )
            attention = max(attention, backend.step_bytes(sizes))
        return max_batch_tokens * self.facts.hidden_size * _HIDDEN_BYTES + attention

    def table_bytes(self, max_requests: int, num_blocks: int) -> int:
        """Return the bytes of the block tables; on a CPU they are reserved, hardly ever filled."""
        if self.facts.device_type == "cpu":
            return 0
        width = self.cache.num_pages(self._longest_request(num_blocks))
        return len(self.cache.groups) * max_requests * width * _TABLE_BYTES

    def buffer_bytes(self, max_batch_tokens: int, max_requests: int, num_blocks: int) -> int:
        """Return the bytes of everything but the cache."""
        return (
            self.logits_bytes(max_requests)
            + self.step_bytes(max_batch_tokens, num_blocks)
            + self.table_bytes(max_requests, num_blocks)
        )

    @cached_property
    def _kinds_of_layers(self) -> tuple[LayerFacts, ...]:
        return tuple({replace(layer, index=0) for layer in self.facts.layers})

    def _longest_request(self, num_blocks: int) -> int:
        """Return a bound of the tokens of one request that grows with the blocks."""
        num_full = sum(span.is_full for span in self.cache.spans)
        if not num_full:
            return self.max_context
        pages = num_blocks * len(self.cache.groups) // num_full
        return min(self.max_context, pages * self.cache.page_size)
