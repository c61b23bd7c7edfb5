"""Decides what each step runs. Pure Python: tested without torch."""

from __future__ import annotations

from cbgen.engine.cache.kv_cache import KVCache
from cbgen.engine.events import EngineObserver
from cbgen.engine.plan import EnginePlan
from cbgen.engine.scheduler.base import Scheduler
from cbgen.engine.scheduler.fifo import FifoScheduler
from cbgen.engine.scheduler.prefill_first import PrefillFirstScheduler
from cbgen.engine.text.detokenizer import Decoder

__all__ = ["Scheduler", "make_scheduler"]

_SCHEDULERS = {"fifo": FifoScheduler, "prefill_first": PrefillFirstScheduler}


def make_scheduler(
    plan: EnginePlan,
    cache: KVCache,
    observer: EngineObserver | None = None,
    tokenizer: Decoder | None = None,
) -> Scheduler:
    """Return the scheduler that the plan names.

    Args:
        plan: every bound.
        cache: an empty cache of the plan's shape.
        observer: is told what happens to rows.
        tokenizer: decodes answers that have stop strings.

    Raises:
        ValueError: the plan names none that there is.
    """
    if plan.scheduler_type not in _SCHEDULERS:
        expected = " or ".join(_SCHEDULERS)
        raise ValueError(f"scheduler_type is {plan.scheduler_type!r}; expected {expected}")
    return _SCHEDULERS[plan.scheduler_type](plan, cache, observer, tokenizer)
