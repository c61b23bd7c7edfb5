"""Turns what the user asked and what is there into an EnginePlan with nothing left to decide.

Small pure functions, one a value; each returns the value with its reason, so that the plan can be
shown. No torch: facts come in as numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from cbgen.engine.attention.backends import ALIASES, BACKENDS, backend_class
from cbgen.engine.cache.groups import LayerGroup, group_layers
from cbgen.engine.cache.shape import NO_LAYERS, CacheShape, largest
from cbgen.engine.config import ContinuousBatchingConfig, WorkloadHints
from cbgen.engine.sizing import MemoryNeeds, PlanFacts
from cbgen.errors import UsageError

__all__ = ["EnginePlan", "PlanFacts", "memory_parts", "resolve"]

_GIB = 1024**3
_MAX_REQUESTS = 1024
_BATCH_TOKENS = {"cpu": 1024}
_DEFAULT_BATCH_TOKENS = 8192
_LEAST_BATCH_TOKENS = 256
_MEMORY_SHARE = {"cpu": 0.6}
_DEFAULT_MEMORY_SHARE = 0.9
_SAFETY_MARGIN = {"fifo": 0.15, "prefill_first": 0.0}
_UNBOUNDED_CONTEXT = 1 << 20
"""Context of models that set no bound themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Every size and choice of an engine. `reasons` says for each decided field why."""

    attn_implementation: str
    cache: CacheShape
    """Pages, blocks, layer groups and dtype of the cache."""
    max_batch_tokens: int
    """Tokens of a step."""
    max_requests: int
    """Requests admitted at once: rows of the persistent buffers."""
    max_context: int
    """Tokens of prompt and answer together that the model takes."""
    vocab_size: int
    """Token ids are in [0, vocab_size)."""
    logits_size: int
    """Columns of the logits."""
    scheduler_type: str
    safety_margin: float
    """Share of the cache below which nothing is admitted beside running requests."""
    first_answer_share: float = 1.0
    """Share of its longest answer that a request is expected to use, until answers have ended."""
    reasons: dict[str, str]
    shares_prefixes: bool = True
    """Whether requests whose tokens begin alike share blocks."""
    warnings: tuple[str, ...] = ()
    """What was given and could not be had as it was given."""

    def __post_init__(self) -> None:
        if self.max_requests > self.max_batch_tokens:
            raise ValueError(
                f"max_requests ({self.max_requests}) must not exceed max_batch_tokens "
                f"({self.max_batch_tokens}): every decoding request runs one token a step"
            )

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request that model and cache can hold."""
        return min(self.max_context, self.cache.max_tokens)

    @property
    def table_blocks(self) -> int:
        """Logical blocks of the longest request: the width of block tables."""
        return self.cache.num_pages(self.longest_request)


def resolve(
    config: ContinuousBatchingConfig,
    attn_implementation: str,
    facts: PlanFacts,
    hints: WorkloadHints | None = None,
) -> EnginePlan:
    """Decide everything.

    Args:
        config: what was asked.
        attn_implementation: name of the attention backend, or auto.
        facts: model and machine.
        hints: what is known of the requests; sizes that nobody gave are made no larger than needed.

    Raises:
        UsageError: what was asked cannot be done on this machine or with this model.
    """
    backend, backend_reason = _attention(attn_implementation, facts)
    max_context, context_reason = facts.max_context, "the model's config"
    if max_context is None:
        max_context, context_reason = _UNBOUNDED_CONTEXT, "the model's config sets no bound"
    needs = MemoryNeeds(
        facts=facts,
        cache=CacheShape(
            config.page_size,
            group_layers(facts.layers) if facts.layers else NO_LAYERS,
            dtype=facts.dtype,
        ),
        backend=backend,
        max_context=max_context,
    )
    sizes = _Sizes(config, needs, hints or WorkloadHints())
    max_batch_tokens, tokens_reason = sizes.batch_tokens()
    max_requests, requests_reason = sizes.requests(max_batch_tokens)
    num_blocks, blocks_reason = sizes.blocks(max_batch_tokens, max_requests)
    num_host_blocks, host_reason, warnings = sizes.host_blocks(
        max_batch_tokens, max_requests, num_blocks
    )
    margin, margin_reason = config.safety_margin, "given"
    if margin is None:
        margin = _SAFETY_MARGIN[config.scheduler_type]
        margin_reason = f"default of {config.scheduler_type}"
    return EnginePlan(
        attn_implementation=backend,
        cache=needs.cache.sized(
            num_blocks * len(needs.cache.groups), max_batch_tokens, num_host_blocks
        ),
        max_batch_tokens=max_batch_tokens,
        max_requests=max_requests,
        max_context=max_context,
        vocab_size=facts.vocab_size,
        logits_size=facts.logits_size,
        safety_margin=margin,
        scheduler_type=config.scheduler_type,
        shares_prefixes=config.allow_block_sharing,
        warnings=warnings,
        reasons={
            "attn_implementation": backend_reason,
            "max_context": context_reason,
            "max_batch_tokens": tokens_reason,
            "max_requests_per_batch": requests_reason,
            "num_blocks": f"{blocks_reason}; {sizes.budget_reason}",
            "safety_margin": margin_reason,
            "allow_block_sharing": _sharing_reason(config, needs.cache.groups),
            "cpu_offload_space": host_reason,
        },
    )


def memory_parts(plan: EnginePlan, facts: PlanFacts) -> dict[str, int]:
    """Return the bytes that a plan takes, by part; `host_pool` is memory of the host."""
    needs = MemoryNeeds(
        facts=facts,
        cache=plan.cache,
        backend=plan.attn_implementation,
        max_context=plan.max_context,
    )
    num_blocks = plan.cache.num_blocks
    return {
        "cache": needs.cache_bytes(num_blocks),
        "logits": needs.logits_bytes(plan.max_requests),
        "activations": needs.step_bytes(plan.max_batch_tokens, num_blocks),
        "block_tables": needs.table_bytes(plan.max_requests, num_blocks),
        "host_pool": plan.cache.num_host_blocks * plan.cache.block_bytes,
    }


class _Sizes:
    """Decides the sizes, one after the other; each takes those before it."""

    def __init__(
        self, config: ContinuousBatchingConfig, needs: MemoryNeeds, hints: WorkloadHints
    ) -> None:
        self._config = config
        self._needs = needs
        self._facts = needs.facts
        self._hints = hints
        share = config.max_memory_percent
        if share is None:
            share = _MEMORY_SHARE.get(self._facts.device_type, _DEFAULT_MEMORY_SHARE)
        self._budget = int(share * self._facts.free_bytes)
        self.budget_reason = f"{share:.0%} of {_size(self._facts.free_bytes)} free memory"
        # What the buffers of a step may take: what the given blocks leave, or half.
        self._room = self._budget // 2
        if config.num_blocks is not None:
            self._room = max(0, self._budget - needs.cache_bytes(config.num_blocks))

    def batch_tokens(self) -> tuple[int, str]:
        """Return the tokens of a step; by default so few that they take half of the buffers."""
        if self._config.max_batch_tokens is not None:
            return self._config.max_batch_tokens, "given"
        most_blocks = self._budget // max(1, self._needs.cache_bytes(1))
        default = _BATCH_TOKENS.get(self._facts.device_type, _DEFAULT_BATCH_TOKENS)
        tokens = default
        while (
            tokens > _LEAST_BATCH_TOKENS
            and self._needs.step_bytes(tokens, most_blocks) > self._room // 2
        ):
            tokens = max(_LEAST_BATCH_TOKENS, tokens // 2)
        if tokens < default:
            return tokens, f"memory is too short for {default}"
        return tokens, f"default on {self._facts.device_type}"

    def requests(self, max_batch_tokens: int) -> tuple[int, str]:
        """Return the requests that may run at once."""
        config, hinted = self._config, self._hints.num_requests
        if config.max_requests_per_batch is not None:
            wanted, reason = config.max_requests_per_batch, "given"
        else:
            wanted, reason = _MAX_REQUESTS, f"up to {_MAX_REQUESTS}, as memory for logits allows"
            if 0 < hinted < wanted:
                wanted, reason = hinted, "all that there are"
            room = min(self._budget // 4, self._room // 2)
            affordable = largest(wanted, lambda count: self._needs.logits_bytes(count) <= room)
            if affordable < wanted:
                wanted, reason = max(1, affordable), "as memory for logits allows"
        if max_batch_tokens < wanted:
            wanted, reason = max_batch_tokens, "no more than max_batch_tokens"
        # Each has a block at least, beside the buffers for so many.
        blocks = config.num_blocks
        if blocks is None:
            blocks = largest(wanted, lambda count: self._fits(max_batch_tokens, count, count))
        if blocks < wanted:
            wanted, reason = max(1, blocks), "no more than num_blocks"
        return wanted, reason

    def _fits(self, max_batch_tokens: int, max_requests: int, num_blocks: int) -> bool:
        needs = self._needs
        buffers = needs.buffer_bytes(max_batch_tokens, max_requests, num_blocks)
        return needs.cache_bytes(num_blocks) + buffers <= self._budget

    def blocks(self, max_batch_tokens: int, max_requests: int) -> tuple[int, str]:
        """Return the blocks of the cache, each of the whole model.

        Raises:
            UsageError: those that were given do not fit, or not even one does.
        """
        needs = self._needs
        buffers = partial(needs.buffer_bytes, max_batch_tokens, max_requests)
        fits = partial(self._fits, max_batch_tokens, max_requests)
        available = f"{_size(self._budget)} are available ({self.budget_reason})"
        given = self._config.num_blocks
        if given is not None:
            if fits(given):
                return given, "given"
            raise UsageError(
                f"num_blocks = {given} needs {_size(needs.cache_bytes(given))} beside "
                f"{_size(buffers(given))} for the buffers of a step, and {available}; lower "
                "num_blocks or max_batch_tokens, or raise max_memory_percent",
                key="continuous_batching_config.num_blocks",
            )
        useful, reason = self._useful_blocks(max_batch_tokens, max_requests)
        wanted = -(-useful // len(needs.cache.groups))
        affordable = largest(wanted, fits)
        if affordable < 1:
            raise UsageError(
                f"no memory for the KV cache: one block takes {_size(needs.cache_bytes(1))} beside "
                f"{_size(buffers(1))} for the buffers of a step, and {available}; lower page_size "
                "or max_batch_tokens, or raise max_memory_percent",
                key="continuous_batching_config.max_batch_tokens",
            )
        return affordable, reason if affordable == wanted else "as many as memory allows"

    def host_blocks(
        self, max_batch_tokens: int, max_requests: int, num_blocks: int
    ) -> tuple[int, str, tuple[str, ...]]:
        """Return the blocks of the host pool, why, and warnings.

        On a CPU it comes out of the same memory as all else, so it may have a share of what the
        cache and the buffers leave.
        """
        needs, space = self._needs, self._config.cpu_offload_space
        if space == 0:
            return 0, "what is preempted is computed again", ()
        if needs.cache.block_bytes == 0:
            return 0, "the model has no cache", ()
        available = self._facts.host_free_bytes
        if self._facts.device_type == "cpu":
            buffers = needs.buffer_bytes(max_batch_tokens, max_requests, num_blocks)
            available = self._facts.free_bytes - needs.cache_bytes(num_blocks) - buffers
        share = self._config.cpu_offload_space_safety_threshold
        most = int(share * available)
        bound = f"{share:.0%} of {_size(available)} of host memory"
        if space is None:
            useful, reason = self._useful_blocks(max_batch_tokens, max_requests)
            if useful <= num_blocks * len(needs.cache.groups):
                return 0, "the cache has room for every request at full length", ()
            affordable = most // needs.cache.block_bytes
            return min(useful, affordable), reason if useful <= affordable else bound, ()
        return self._given_host_blocks(space, most, bound)

    def _given_host_blocks(
        self, space: float, most: int, bound: str
    ) -> tuple[int, str, tuple[str, ...]]:
        warnings, reason, num_bytes = [], "given", most
        if space * _GIB <= most:
            num_bytes = int(space * _GIB)
        else:
            reason = f"no more than {bound}"
            warnings.append(f"cpu_offload_space = {space} GiB is cut to {_size(most)}, {bound}")
        num_blocks = num_bytes // self._needs.cache.block_bytes
        if num_blocks == 0:
            reason = "too small for one block"
            warnings.append(
                f"cpu_offload_space: {_size(num_bytes)} are too small for one block of "
                f"{_size(self._needs.cache.block_bytes)}; nothing is offloaded: give it more"
            )
        return num_blocks, reason, tuple(warnings)

    def _useful_blocks(self, max_batch_tokens: int, max_requests: int) -> tuple[int, str]:
        """Return the blocks of the pool for every request at full length, and in words.

        Hints bound that length, but there is always room for one request of full context.
        """
        shape = replace(self._needs.cache, chunk_tokens=max_batch_tokens)
        max_context, hints = self._needs.max_context, self._hints
        one = shape.blocks_for(max_context)
        hinted = hints.max_prompt_length + hints.max_generated_length
        if hints.max_prompt_length and hints.max_generated_length and hinted < max_context:
            blocks = max(one, max_requests * shape.blocks_for(hinted))
            return blocks, f"enough for every request at {hinted} tokens"
        return max_requests * one, "enough for every request at full length"


def _attention(name: str, facts: PlanFacts) -> tuple[str, str]:
    """Return the attention backend and why: the one that was named, or the best that serves."""
    if name != "auto":
        name = ALIASES.get(name, name)
        refusal = backend_class(name).refusal(facts)
        if refusal is not None:
            raise UsageError(
                f"model.attn_implementation is {name!r}, and {refusal.reason}{refusal.remedy}",
                key="model.attn_implementation",
            )
        advantage = backend_class(name).advantage(facts)
        return name, "given" if advantage is None else f"given; {advantage}"
    reason = "the best backend that is there"
    for candidate in BACKENDS:
        backend = backend_class(candidate)
        refusal = backend.refusal(facts)
        if refusal is None:
            return candidate, backend.advantage(facts) or reason
        reason = refusal.reason  # of the last better one
    raise UsageError(f"no attention backend serves the model: {reason}")


def _sharing_reason(config: ContinuousBatchingConfig, groups: Sequence[LayerGroup]) -> str:
    if not config.allow_block_sharing:
        return "given"
    if all(group.span.is_full for group in groups):
        return "default"
    return "layers with a window keep what the window still needs"


def _size(num_bytes: int) -> str:
    if num_bytes >= _GIB:
        return f"{num_bytes / _GIB:.2f} GiB"
    if num_bytes >= 2**20:
        return f"{num_bytes / 2**20:.2f} MiB"
    return f"{num_bytes / 2**10:.2f} KiB"
