"""Who gets the tokens of a step first: the orders of scheduling that a recipe may name."""

from __future__ import annotations

from cbgen.engine.cache.kv_cache import KVCache
from cbgen.engine.events import EngineObserver
from cbgen.engine.plan import EnginePlan
from cbgen.engine.request import Request
from cbgen.engine.scheduler.builder import BatchBuilder
from cbgen.engine.scheduler.scheduler import Scheduler


class FifoScheduler(Scheduler):
    """Decoding requests first, then prompts in order of admission, in chunks.

    No running answer ever waits for a prompt; prompts take what tokens are left.
    """

    def _run_admitted(
        self, builder: BatchBuilder, decoding: list[Request], prefilling: list[Request]
    ) -> None:
        self._decode(builder, decoding)
        self._prefill(builder, prefilling)


class PrefillFirstScheduler(Scheduler):
    """Admitted prompts first, then decoding requests; new requests come after both.

    Prompts are finished as fast as possible, so that many requests decode together soon.
    """

    def _run_admitted(
        self, builder: BatchBuilder, decoding: list[Request], prefilling: list[Request]
    ) -> None:
        self._prefill(builder, prefilling)
        self._decode(builder, decoding)


_SCHEDULERS = {"fifo": FifoScheduler, "prefill_first": PrefillFirstScheduler}


def make_scheduler(
    plan: EnginePlan, cache: KVCache, observer: EngineObserver | None = None
) -> Scheduler:
    """Return the scheduler that the plan names.

    Args:
        plan: every bound.
        cache: an empty cache of the plan's shape.
        observer: is told what happens to rows.

    Raises:
        ValueError: the plan names none that there is.
    """
    if plan.scheduler_type not in _SCHEDULERS:
        expected = " or ".join(_SCHEDULERS)
        raise ValueError(f"scheduler_type is {plan.scheduler_type!r}; expected {expected}")
    return _SCHEDULERS[plan.scheduler_type](plan, cache, observer)
