"""Which requests can never run, and how long an answer may become."""

from __future__ import annotations

from cbgen.engine.plan import EnginePlan
from cbgen.engine.request import Request
from cbgen.errors import RowError


def refusal(
    request: Request, plan: EnginePlan, *, is_duplicate: bool, has_tokenizer: bool
) -> RowError | None:
    """Return why a request can never run, or None if it can.

    Args:
        request: the request, not yet taken.
        plan: the bounds of the engine.
        is_duplicate: whether an unfinished request has the same id.
        has_tokenizer: whether the text of answers is known, so that stop strings can be found.
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
    if request.params.stop_strings and not has_tokenizer:
        return _error(
            "no_tokenizer",
            "stop strings are found in text, and the engine has no tokenizer; give it one "
            "(tokenizer=... of the manager), or use stop_token_ids",
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
