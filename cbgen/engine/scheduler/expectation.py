"""How long an answer will probably become: admission leaves room for it, so preemption is rare."""

from __future__ import annotations

import math

from cbgen.engine.request import Request

_UNBOUNDED_ANSWER = 512
"""First guess for requests that set no bound themselves."""
_LEARN_AFTER = 8
"""Answers that must have ended before their lengths say more than the bound does."""
_WEIGHT = 1 / 64
"""Of one answer in the running mean, once there are many."""
_RAISE, _LOWER, _MOST_CAUTION = 1.25, 0.98, 4.0


class AnswerExpectation:
    """Learns from the answers that have ended: mean and spread of their lengths in tokens.

    Short answers end first, so the early estimate is low. Preemptions tell when it was too low:
    each raises it by a quarter, and each answer that ends lowers it again by a little.

    Args:
        first_share: share of its longest answer that a request is expected to use before anything
            has been learned.
    """

    def __init__(self, first_share: float = 1.0) -> None:
        self._first_share = first_share
        self._num_ended = 0
        self._mean = 0.0
        self._variance = 0.0
        self._caution = 1.0

    def num_tokens(self, request: Request) -> int:
        """Return the expected tokens of prompt and answer together."""
        allowed = request.max_tokens - len(request.prompt_ids)
        if self._num_ended >= _LEARN_AFTER:
            answer = (self._mean + math.sqrt(self._variance)) * self._caution
        else:
            if request.params.max_new_tokens is None:
                allowed = min(allowed, _UNBOUNDED_ANSWER)
            answer = self._first_share * allowed
        whole = len(request.prompt_ids) + min(allowed, math.ceil(answer))
        # It is still running, so it is longer than what is known.
        return min(max(whole, request.num_tokens + 1), request.max_tokens)

    def ended(self, num_generated: int) -> None:
        """Learn the length of an answer that came to its own end."""
        self._num_ended += 1
        weight = max(_WEIGHT, 1 / self._num_ended)
        difference = num_generated - self._mean
        self._mean += weight * difference
        self._variance = (1 - weight) * (self._variance + weight * difference**2)
        self._caution = max(1.0, self._caution * _LOWER)

    def preempted(self) -> None:
        """Learn that there was no room for what was admitted."""
        self._caution = min(_MOST_CAUTION, self._caution * _RAISE)
        self._first_share = min(1.0, self._first_share * _RAISE)
