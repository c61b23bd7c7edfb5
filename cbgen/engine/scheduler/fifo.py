"""First in, first out: decoding requests first, then prompts in order of admission, in chunks."""

from __future__ import annotations

from cbgen.engine.request import Request
from cbgen.engine.scheduler.builder import BatchBuilder
from cbgen.engine.scheduler.continuous import ContinuousScheduler


class FifoScheduler(ContinuousScheduler):
    """No running answer ever waits for a prompt; prompts take what tokens are left."""

    def _run_admitted(
        self, builder: BatchBuilder, decoding: list[Request], prefilling: list[Request]
    ) -> None:
        self._decode(builder, decoding)
        self._prefill(builder, prefilling)
