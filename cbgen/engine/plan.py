"""Turns what the user asked and what is there into an EnginePlan with nothing left to decide.

Small pure functions, one a value; each returns the value with its reason, so that the plan can be
shown. No torch: facts come in as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from cbgen.engine.cache.groups import LayerFacts, group_layers
from cbgen.engine.config import ContinuousBatchingConfig
from cbgen.errors import UsageError

_GIB = 1024**3
_MAX_REQUESTS = 1024
_BATCH_TOKENS = {"cpu": 1024}
_DEFAULT_BATCH_TOKENS = 8192
_MEMORY_SHARE = {"cpu": 0.6}
_DEFAULT_MEMORY_SHARE = 0.9
_SAFETY_MARGIN = {"fifo": 0.15}
_UNBOUNDED_CONTEXT = 1 << 20
"""Context of models that set no bound themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """Model and machine, in numbers."""

    device_type: str
    """cpu | cuda."""
    free_bytes: int
    """Memory that cache and buffers may come from, weights already loaded."""
    layers: tuple[LayerFacts, ...]
    cache_itemsize: int
    """Bytes of one key or value element."""
    logits_size: int
    hidden_size: int
    max_context: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Every size and choice of an engine. `reasons` says for each decided field why."""

    attn_implementation: str
    page_size: int
    num_blocks: int
    max_batch_tokens: int
    max_requests: int
    max_context: int
    safety_margin: float
    scheduler_type: str
    reasons: dict[str, str]

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.num_blocks * self.page_size


def resolve(
    config: ContinuousBatchingConfig, attn_implementation: str, facts: PlanFacts
) -> EnginePlan:
    """Decide everything.

    Raises:
        UsageError: what was asked cannot be done on this machine or with this model.
    """
    backend, backend_reason = _attention(attn_implementation, facts)
    max_context, context_reason = _context(facts)
    max_batch_tokens, tokens_reason = _batch_tokens(config, facts)
    budget, budget_reason = _memory(config, facts)
    max_requests, requests_reason = _requests(config, facts, max_batch_tokens, budget)
    working = working_bytes(max_requests, max_batch_tokens, facts)
    num_blocks, blocks_reason = _blocks(config, facts, budget - working, max_requests * max_context)
    margin = config.safety_margin
    return EnginePlan(
        attn_implementation=backend,
        page_size=config.page_size,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        max_requests=max_requests,
        max_context=max_context,
        safety_margin=_SAFETY_MARGIN[config.scheduler_type] if margin is None else margin,
        scheduler_type=config.scheduler_type,
        reasons={
            "attn_implementation": backend_reason,
            "max_context": context_reason,
            "max_batch_tokens": tokens_reason,
            "max_requests_per_batch": requests_reason,
            "num_blocks": f"{blocks_reason}; {budget_reason}",
        },
    )


def working_bytes(max_requests: int, max_batch_tokens: int, facts: PlanFacts) -> int:
    """Return the bytes kept for logits, in the model's dtype and in float32, and activations."""
    return max_requests * facts.logits_size * 8 + max_batch_tokens * facts.hidden_size * 64


def cache_bytes(plan: EnginePlan, facts: PlanFacts) -> int:
    """Return the bytes of all blocks of the cache."""
    (group,) = group_layers(facts.layers)
    return plan.num_blocks * group.block_bytes(plan.page_size, facts.cache_itemsize)


def _attention(name: str, facts: PlanFacts) -> tuple[str, str]:
    needs = [
        need
        for need, wanted in (
            ("softcap", any(layer.has_softcap for layer in facts.layers)),
            ("sinks", any(layer.has_sinks for layer in facts.layers)),
        )
        if wanted
    ]
    if name in ("eager", "paged|eager"):
        return "eager", "given"
    if not needs:
        return "sdpa", "given" if name == "sdpa" else "the best backend that is there"
    if name == "sdpa":
        raise UsageError(
            f"model.attn_implementation is 'sdpa', and the model's attention has "
            f"{' and '.join(needs)}, which sdpa cannot compute; use eager or auto"
        )
    return "eager", f"the model's attention has {' and '.join(needs)}"


def _context(facts: PlanFacts) -> tuple[int, str]:
    if facts.max_context is None:
        return _UNBOUNDED_CONTEXT, "the model's config sets no bound"
    return facts.max_context, "the model's config"


def _batch_tokens(config: ContinuousBatchingConfig, facts: PlanFacts) -> tuple[int, str]:
    if config.max_batch_tokens is not None:
        return config.max_batch_tokens, "given"
    default = _BATCH_TOKENS.get(facts.device_type, _DEFAULT_BATCH_TOKENS)
    return default, f"default on {facts.device_type}"


def _memory(config: ContinuousBatchingConfig, facts: PlanFacts) -> tuple[int, str]:
    share = config.max_memory_percent
    if share is None:
        share = _MEMORY_SHARE.get(facts.device_type, _DEFAULT_MEMORY_SHARE)
    budget = int(share * facts.free_bytes)
    return budget, f"{share:.0%} of {facts.free_bytes / _GIB:.1f} GiB free memory"


def _requests(
    config: ContinuousBatchingConfig, facts: PlanFacts, max_batch_tokens: int, budget: int
) -> tuple[int, str]:
    if config.max_requests_per_batch is not None:
        wanted, reason = config.max_requests_per_batch, "given"
    else:
        # Logits in the model's dtype and in float32; an eighth of the memory is theirs.
        affordable = max(1, budget // 8 // max(1, facts.logits_size * 8))
        wanted, reason = min(_MAX_REQUESTS, affordable), "up to 1024, as memory for logits allows"
    bounds = [(max_batch_tokens, "max_batch_tokens")]
    if config.num_blocks is not None:
        bounds.append((config.num_blocks, "num_blocks"))
    for bound, name in bounds:
        if bound < wanted:
            wanted, reason = bound, f"no more than {name}"
    return wanted, reason


def _blocks(
    config: ContinuousBatchingConfig, facts: PlanFacts, available: int, most_tokens: int
) -> tuple[int, str]:
    (group,) = group_layers(facts.layers)
    block_bytes = group.block_bytes(config.page_size, facts.cache_itemsize)
    if config.num_blocks is not None:
        needed = config.num_blocks * block_bytes
        if needed > available:
            raise UsageError(
                f"num_blocks = {config.num_blocks} needs {_size(needed)}, and "
                f"{_size(max(available, 0))} are available; lower num_blocks or raise "
                "max_memory_percent"
            )
        return config.num_blocks, "given"
    useful = -(-most_tokens // config.page_size)
    affordable = available // block_bytes if block_bytes else useful
    if affordable < 1:
        raise UsageError(
            f"no memory for the KV cache: one block takes {_size(block_bytes)}, and "
            f"{_size(max(available, 0))} are available; lower page_size or max_batch_tokens, or "
            "raise max_memory_percent"
        )
    if affordable < useful:
        return affordable, "as many as memory allows"
    return useful, "enough for every request at full length"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / 2**20:.2f} MiB"
