"""Decides what each step runs. Pure Python: tested without torch."""

from __future__ import annotations

from cbgen.engine.cache.kv_cache import KVCache
from cbgen.engine.events import EngineObserver
from cbgen.engine.scheduler.base import Scheduler, SchedulerLimits
from cbgen.engine.scheduler.fifo import FifoScheduler
from cbgen.engine.scheduler.prefill_first import PrefillFirstScheduler

__all__ = ["Scheduler", "SchedulerLimits", "make_scheduler"]

_SCHEDULERS = {"fifo": FifoScheduler, "prefill_first": PrefillFirstScheduler}


def make_scheduler(
    scheduler_type: str,
    cache: KVCache,
    limits: SchedulerLimits,
    observer: EngineObserver | None = None,
) -> Scheduler:
    """Return the scheduler of that name.

    Raises:
        ValueError: the name is unknown.
    """
    if scheduler_type not in _SCHEDULERS:
        expected = " or ".join(_SCHEDULERS)
        raise ValueError(f"scheduler_type is {scheduler_type!r}; expected {expected}")
    return _SCHEDULERS[scheduler_type](cache, limits, observer)
