"""Which requests may run: never, or now beside the others; and how long an answer may become."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable

from cbgen.engine.cache.kv_cache import KVCache
from cbgen.engine.cache.prefix import PrefixMatch
from cbgen.engine.plan import EnginePlan
from cbgen.engine.request import Request
from cbgen.errors import RowError

_UNBOUNDED_ANSWER = 512
"""First guess for requests that set no bound themselves."""
_LEARN_AFTER = 8
"""Answers that must have ended before their lengths say more than the bound does."""
_WEIGHT = 1 / 64
"""Of one answer in the running mean, once there are many."""
_RAISE, _LOWER, _MOST_CAUTION = 1.25, 0.98, 4.0


def refusal(request: Request, plan: EnginePlan, *, is_duplicate: bool) -> RowError | None:
    """Return why a request can never run, or None if it can.

    Args:
        request: the request, not yet taken.
        plan: the bounds of the engine.
        is_duplicate: whether an unfinished request has the same id.
    """
    prompt_ids = request.prompt_ids
    if is_duplicate:
        return _error(
            "duplicate_id", f"a request with id {request.request_id!r} is still unfinished"
        )
    if not prompt_ids:
        return _error("empty_prompt", "the prompt has no tokens; give at least one")
    if min(prompt_ids) < 0 or max(prompt_ids) >= plan.vocab_size:
        wrong = next(t for t in prompt_ids if not 0 <= t < plan.vocab_size)
        return _error(
            "token_out_of_vocabulary",
            f"token id {wrong} at position {prompt_ids.index(wrong)} is outside the model's "
            f"vocabulary of {plan.vocab_size} tokens",
        )
    if len(prompt_ids) >= plan.max_context:
        return _error(
            "prompt_too_long",
            f"the prompt has {len(prompt_ids)} tokens, and the model's context of "
            f"{plan.max_context} must hold it and at least one new token; shorten it or set "
            "prompt.truncation",
        )
    cache_tokens = plan.cache.max_tokens
    if len(prompt_ids) > cache_tokens:
        return _error(
            "prompt_exceeds_cache",
            f"the prompt has {len(prompt_ids)} tokens, and the KV cache holds {cache_tokens}; "
            "shorten it or raise num_blocks",
        )
    if request.params.stop_strings and request.stop_checker is None:
        return _error(
            "no_tokenizer",
            "stop strings are found in text, and there is no tokenizer; give the manager "
            "tokenizer=..., or set stop_strings: [] and use stop_token_ids",
        )
    return None


def token_limit(request: Request, plan: EnginePlan) -> int:
    """Return the tokens of prompt and answer together at which a request ends with `length`.

    A request that sets no bound itself takes what context and cache leave. One that does is never
    cut short by the cache: it fails when it outgrows it, see `outgrown`. The last token is never
    stored, so a cache of n tokens allows n + 1.
    """
    if request.params.max_new_tokens is None:
        return min(plan.max_context, plan.cache.max_tokens + 1)
    return min(len(request.prompt_ids) + request.params.max_new_tokens, plan.max_context)


def outgrown(cache_tokens: int) -> RowError:
    """Return why a request that fills the whole cache alone cannot go on."""
    return _error(
        "answer_exceeds_cache",
        f"prompt and answer outgrew the KV cache of {cache_tokens} tokens before the answer had "
        "max_new_tokens; raise num_blocks or lower max_new_tokens",
    )


def _error(code: str, message: str) -> RowError:
    return RowError(code, message, type="invalid_request")


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


class Admission:
    """Decides whether a waiting request may be admitted beside those that run.

    Owns what admitted requests are expected to need, which leaves room for their answers, so that
    preemption is rare.

    Attributes:
        expectation: how long answers are expected to become.
        expected_blocks: blocks that all admitted requests are expected to need.
    """

    def __init__(self, plan: EnginePlan, cache: KVCache) -> None:
        self._cache = cache
        self._least_free = plan.safety_margin * cache.pool.num_blocks
        self.expectation = AnswerExpectation(plan.first_answer_share)
        self.expected_blocks = 0

    def fits(self, request: Request, match: PrefixMatch, *, is_alone: bool) -> bool:
        """Whether a request may be admitted now; alone, whatever it is expected to need."""
        cache = self._cache
        # What others have in use already is counted with them. A prompt holds more in groups with a
        # window, but not for long: `can_admit` looks at that. Who uses a page uses all before it.
        shared = bisect_left(match.nodes, True, key=lambda node: node.num_users == 0)
        num_tokens = self.expectation.num_tokens(request) - 1
        request.expected_blocks = cache.shape.lasting_blocks(num_tokens, shared)
        if not is_alone:
            if cache.pool.num_free < self._least_free:
                return False
            if self.expected_blocks + request.expected_blocks > cache.pool.num_blocks:
                return False
        return cache.can_admit(request, match)

    def add(self, request: Request) -> None:
        """Count a request that is admitted."""
        self.expected_blocks += request.expected_blocks

    def remove(self, request: Request) -> None:
        """Count it no more."""
        self.expected_blocks -= request.expected_blocks

    def check(self, admitted: Iterable[Request]) -> None:
        """Compare the expected blocks with those of the admitted requests.

        Raises:
            AssertionError: they differ.
        """
        if self.expected_blocks != sum(request.expected_blocks for request in admitted):
            raise AssertionError("the expected blocks are not those of the admitted requests")
