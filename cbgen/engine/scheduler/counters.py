"""Totals of a scheduler since its start."""

from __future__ import annotations

from dataclasses import dataclass

from cbgen.engine.cache.kv_cache import KVCache
from cbgen.engine.events import StepStats
from cbgen.engine.request import Request


@dataclass(slots=True)
class Counters:
    """What `StepStats` tells of the past; its field comments say what is counted."""

    steps: int = 0
    peak_used_blocks: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    offloaded_blocks: int = 0

    def admitted(self, request: Request) -> None:
        """Count what an admitted request has computed already, or has lost."""
        if request.num_preemptions == 0:
            self.cached_tokens += request.num_computed_tokens
        else:
            lost = request.num_lost_tokens - request.num_computed_tokens
            self.recomputed_tokens += max(0, lost)

    def scheduled(self, num_tokens: int, cache: KVCache) -> None:
        """Count a step of so many tokens."""
        self.steps += 1
        self.computed_tokens += num_tokens
        used_blocks = cache.num_blocks - cache.num_free_blocks
        self.peak_used_blocks = max(self.peak_used_blocks, used_blocks)

    def preempted(self, num_offloaded_blocks: int) -> None:
        """Count a preemption."""
        self.preemptions += 1
        self.offloaded_blocks += num_offloaded_blocks

    def snapshot(self, cache: KVCache, num_waiting: int, num_running: int) -> StepStats:
        """Return the totals together with what is now."""
        return StepStats(
            num_steps=self.steps,
            num_waiting=num_waiting,
            num_running=num_running,
            num_blocks=cache.num_blocks,
            num_used_blocks=cache.num_blocks - cache.num_free_blocks,
            peak_used_blocks=self.peak_used_blocks,
            num_computed_tokens=self.computed_tokens,
            num_generated_tokens=self.generated_tokens,
            num_recomputed_tokens=self.recomputed_tokens,
            num_preemptions=self.preemptions,
            num_cached_tokens=self.cached_tokens,
            num_evictions=cache.num_evictions,
            num_offloaded_blocks=self.offloaded_blocks,
        )
