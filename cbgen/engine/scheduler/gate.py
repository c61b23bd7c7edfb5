"""Decides whether a waiting request may be admitted beside those that run."""

from __future__ import annotations

from cbgen.engine.cache.kv_cache import KVCache
from cbgen.engine.cache.prefix import PrefixMatch
from cbgen.engine.plan import EnginePlan
from cbgen.engine.request import Request
from cbgen.engine.scheduler.expectation import AnswerExpectation


class AdmissionGate:
    """Owns what admitted requests are expected to need.

    Attributes:
        expectation: how long answers are expected to become.
        expected_blocks: blocks that all admitted requests are expected to need.
    """

    def __init__(self, plan: EnginePlan, cache: KVCache) -> None:
        self._cache = cache
        self._least_free = plan.safety_margin * cache.num_blocks
        self.expectation = AnswerExpectation(plan.first_answer_share)
        self.expected_blocks = 0

    def fits(self, request: Request, match: PrefixMatch, *, is_alone: bool) -> bool:
        """Whether a request may be admitted now; alone, whatever it is expected to need."""
        cache = self._cache
        # What others have in use already is counted with them. A prompt holds more in groups with a
        # window, but not for long: `can_admit` looks at that.
        shared = sum(node.num_users > 0 for node in match.nodes)
        num_tokens = self.expectation.num_tokens(request) - 1
        request.expected_blocks = cache.shape.lasting_blocks(num_tokens, shared)
        if not is_alone:
            if cache.num_free_blocks < self._least_free:
                return False
            if self.expected_blocks + request.expected_blocks > cache.num_blocks:
                return False
        return cache.can_admit(request, match)

    def enter(self, request: Request) -> None:
        """Count a request that is admitted."""
        self.expected_blocks += request.expected_blocks

    def leave(self, request: Request) -> None:
        """Count it no more."""
        self.expected_blocks -= request.expected_blocks
