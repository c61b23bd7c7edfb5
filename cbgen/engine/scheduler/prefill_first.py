"""Admitted prompts first, then decoding requests; new requests come after both."""

from __future__ import annotations

from cbgen.engine.request import Request
from cbgen.engine.scheduler.builder import BatchBuilder
from cbgen.engine.scheduler.continuous import ContinuousScheduler


class PrefillFirstScheduler(ContinuousScheduler):
    """Prompts are finished as fast as possible, so that many requests decode together soon."""

    def _run_admitted(
        self, builder: BatchBuilder, decoding: list[Request], prefilling: list[Request]
    ) -> None:
        self._prefill(builder, prefilling)
        self._decode(builder, decoding)
