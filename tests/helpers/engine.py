"""Factories for scheduler and cache, and the loop that drives them. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cbgen.engine.cache.groups import AttentionSpan, LayerGroup
from cbgen.engine.cache.kv_cache import KVCache, Placement
from cbgen.engine.cache.shape import CacheShape
from cbgen.engine.core import Engine
from cbgen.engine.events import EngineObserver
from cbgen.engine.plan import EnginePlan
from cbgen.engine.request import GenerationOutput, Request
from cbgen.engine.sampling.params import SamplingParams
from cbgen.engine.scheduler.policies import make_scheduler as scheduler_of_plan
from cbgen.engine.scheduler.scheduler import Scheduler
from cbgen.engine.step import SampledTokens, ScheduledBatch, ScheduledRequest, StepResult
from cbgen.engine.text import TokenDecoder

VOCAB_SIZE = 128


def make_shape(
    num_blocks: int = 8,
    page_size: int = 4,
    *,
    spans: Sequence[AttentionSpan] = (AttentionSpan(),),
    max_batch_tokens: int = 1024,
    num_host_blocks: int = 0,
) -> CacheShape:
    """Return the shape of a cache for layers of these spans, which take no memory."""
    groups = tuple(LayerGroup(span, ()) for span in spans)
    return CacheShape(page_size, groups).sized(num_blocks, max_batch_tokens, num_host_blocks)


def make_cache(
    num_blocks: int = 8, page_size: int = 4, *, shares_prefixes: bool = True, **options
) -> KVCache:
    """Return an empty cache; `options` are arguments of `make_shape`."""
    shape = make_shape(num_blocks, page_size, **options)
    return KVCache(shape, shares_prefixes=shares_prefixes)


def make_plan(cache: CacheShape | None = None, **changes) -> EnginePlan:
    """Return a plan that binds little, for any answer; `changes` are fields of EnginePlan."""
    defaults = {
        "attn_implementation": "sdpa",
        "max_batch_tokens": 16,
        "max_requests": 8,
        "max_context": 64,
        "vocab_size": VOCAB_SIZE,
        "logits_size": VOCAB_SIZE,
        "scheduler_type": "fifo",
        "safety_margin": 0.0,
        "first_answer_share": 0.0,
        "reasons": {},
    }
    fields = defaults | changes
    if cache is None:
        cache = make_shape(max_batch_tokens=fields["max_batch_tokens"])
    return EnginePlan(cache=cache, **fields)


def make_scheduler(
    scheduler_type: str = "fifo",
    *,
    num_blocks: int = 32,
    page_size: int = 4,
    spans: Sequence[AttentionSpan] = (AttentionSpan(),),
    shares_prefixes: bool = False,
    num_host_blocks: int = 0,
    observer: EngineObserver | None = None,
    max_batch_tokens: int = 16,
    **plan,
) -> Scheduler:
    """Return a scheduler over a new cache; prompts that begin alike share nothing unless asked."""
    cache = make_cache(
        num_blocks,
        page_size,
        spans=spans,
        max_batch_tokens=max_batch_tokens,
        shares_prefixes=shares_prefixes,
        num_host_blocks=num_host_blocks,
    )
    decided = make_plan(
        cache.shape, scheduler_type=scheduler_type, max_batch_tokens=max_batch_tokens, **plan
    )
    return scheduler_of_plan(decided, cache, observer)


def make_request(
    request_id: str = "a",
    prompt: int | Sequence[int] = 4,
    *,
    parent_id: str | None = None,
    tokenizer: TokenDecoder | None = None,
    **params,
) -> Request:
    """Return a request; `prompt` is token ids or their number, `params` are SamplingParams."""
    ids = [1 + i % (VOCAB_SIZE - 1) for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Request(
        request_id, ids, SamplingParams(**params), parent_id=parent_id, tokenizer=tokenizer
    )


class LetterTokenizer:
    """Decodes each token to one of a few letters."""

    letters = "abcde"

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return a letter for each token."""
        return "".join(self.letters[token % len(self.letters)] for token in token_ids)


def until_stop(
    token_ids: Sequence[int], stop_strings: Sequence[str]
) -> tuple[list[int], str | None]:
    """Return an answer's tokens until one completes a stop string in its letters, and that."""
    tokenizer = LetterTokenizer()
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(list(token_ids[:end]), skip_special_tokens=True)
        found = [(text.find(stop), len(stop), stop) for stop in stop_strings if stop in text]
        if found:
            return list(token_ids[:end]), min(found)[2]
    return list(token_ids), None


def place(cache: KVCache, request: Request, step: int = 1) -> Placement:
    """Admit a request to a cache, with all that it finds there."""
    return cache.admit(request, cache.match(request, step), step)


def scheduled_ids(batch: ScheduledBatch) -> list[str]:
    """Return the ids of the requests of a step, in its order."""
    return [item.request_id for item in batch.requests]


def token_counts(batch: ScheduledBatch) -> dict[str, int]:
    """Return how many tokens of each request run in a step."""
    return {item.request_id: item.num_tokens for item in batch.requests}


def answer(
    batch: ScheduledBatch, token: Callable[[ScheduledRequest], int] = lambda item: 7
) -> StepResult:
    """Return the result of a step in which `token` was sampled wherever a token was wanted."""
    wanted = [item for item in batch.requests if item.num_samples]
    return StepResult(tuple(SampledTokens((token(item),), (-0.5,)) for item in wanted))


def take_step(
    scheduler: Scheduler, token: Callable[[ScheduledRequest], int] = lambda item: 7
) -> ScheduledBatch:
    """Schedule and answer one step, checking the bookkeeping before and after the answer."""
    batch = scheduler.schedule()
    scheduler.check()
    scheduler.update(batch, answer(batch, token))
    scheduler.check()
    return batch


def run_scheduler(
    scheduler: Scheduler,
    requests: Iterable[Request] = (),
    token: Callable[[ScheduledRequest], int] = lambda item: 7,
) -> list[Request]:
    """Add requests, step until all have ended, and return them in the order in which they ended."""
    for request in requests:
        scheduler.add(request)
    ended = scheduler.take_finished()
    while scheduler.has_unfinished():
        take_step(scheduler, token)
        ended += scheduler.take_finished()
    return ended


def run_engine(engine: Engine, requests: Iterable[Request]) -> dict[str, GenerationOutput]:
    """Add requests, step until all have ended, and return their outputs by id."""
    for request in requests:
        engine.add(request)
    outputs = engine.step()
    while engine.has_unfinished():
        outputs += engine.step()
    return {output.request_id: output for output in outputs}


def tokens_of(outputs: dict[str, GenerationOutput]) -> dict[str, list[int]]:
    """Return the generated tokens by id."""
    return {request_id: output.generated_tokens for request_id, output in outputs.items()}
