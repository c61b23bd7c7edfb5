"""Random schedules over shadow blocks: no request ever sees a key that is not its own."""

from __future__ import annotations

import random

import pytest

from cbgen.engine.cache.groups import AttentionSpan
from cbgen.engine.cache.kv_cache import KVCache
from cbgen.engine.cache.search import PrefixSearch
from cbgen.engine.core import Engine
from cbgen.engine.request import GenerationOutput, Request, RequestStatus
from cbgen.engine.scheduler.policies import make_scheduler
from tests.helpers.engine import make_cache, make_plan, make_request
from tests.helpers.shadow import VOCAB_SIZE, ShadowRunner, shadow_answer

SPANS = (
    (AttentionSpan(),),
    (AttentionSpan(), AttentionSpan(window=7)),
    (AttentionSpan(window=1), AttentionSpan(), AttentionSpan(window=9)),
    (AttentionSpan(window=6),),
    (AttentionSpan(chunk=8), AttentionSpan()),
)
MAX_TOKENS = 56
NUM_REQUESTS = 25


class Run:
    """One random run; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        choose = self.choose
        spans = SPANS[seed % len(SPANS)]
        page_size = choose.choice([4, 5, 8, 16])
        needed = -(-MAX_TOKENS // page_size) * len(spans)
        max_batch_tokens = choose.choice([6, 16, 64])
        self.cache = make_cache(
            needed + choose.choice([0, 1, 3, 40]),
            page_size,
            spans=spans,
            max_batch_tokens=max_batch_tokens,
            shares_prefixes=choose.random() < 0.8,
            num_host_blocks=choose.choice([0, 0, 3, 10, 100]),
        )
        plan = make_plan(
            self.cache.shape,
            max_batch_tokens=max_batch_tokens,
            max_requests=choose.choice([2, 4, 6]),
            safety_margin=choose.choice([0.0, 0.0, 0.15]),
            first_answer_share=choose.choice([0.0, 0.0, 1.0]),
            max_context=MAX_TOKENS,
            scheduler_type=choose.choice(["fifo", "prefill_first"]),
        )
        self.runner = ShadowRunner(page_size, spans)
        self.engine = Engine(make_scheduler(plan, self.cache), self.runner, check=True)
        self.texts = [self.tokens(choose.randrange(1, 41)) for _ in range(4)]
        self.requests = [self.request(str(number)) for number in range(NUM_REQUESTS)]

    def tokens(self, count: int) -> list[int]:
        return [self.choose.randrange(1, VOCAB_SIZE) for _ in range(count)]

    def request(self, request_id: str) -> Request:
        """Return a request that often begins as others do, or as others with their answers do."""
        choose = self.choose
        text = choose.choice(self.texts)
        start = text[: choose.choice([3, 9, 16, len(text)])]
        prompt = start + self.tokens(choose.choice([0, 1, 5]))
        if choose.random() < 0.2:
            self.texts.append(
                (prompt + shadow_answer(make_request("", prompt, max_new_tokens=6)))[:40]
            )
        return make_request(
            request_id,
            prompt,
            max_new_tokens=min(choose.choice([1, 5, 20, 50]), MAX_TOKENS - len(prompt)),
            stop_token_ids=frozenset(range(1, choose.choice([1, 1, 5]))),
        )

    def finish(self) -> dict[str, GenerationOutput]:
        """Let requests arrive between steps, cancel some, and return all outputs by id."""
        choose = self.choose
        to_come = list(reversed(self.requests))
        outputs: list[GenerationOutput] = []
        while to_come or self.engine.has_unfinished():
            for _ in range(choose.choice([0, 0, 1, 2, 8])):
                if to_come:
                    self.engine.add(to_come.pop())
            unfinished = self.engine.unfinished()
            if unfinished and choose.random() < 0.05:
                self.engine.cancel(choose.choice(unfinished).request_id)
            if choose.random() < 0.01:
                self.engine.reset_prefix_cache()
            outputs += self.engine.step()
        assert len(outputs) == len(self.requests)
        return {output.request_id: output for output in outputs}


def run(seed: int) -> Run:
    """Run one schedule and compare every answer."""
    done = Run(seed)
    outputs = done.finish()
    for request in done.requests:
        output, answer = outputs[request.request_id], shadow_answer(request)
        if output.status is RequestStatus.CANCELLED:
            answer = answer[: len(output.generated_tokens)]
        assert output.generated_tokens == answer
    assert done.cache.pool.num_free == done.cache.pool.num_blocks
    return done


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_every_query_finds_its_own_keys(first):
    for seed in range(first, first + 20):
        run(seed)


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_what_was_kept_of_a_search_is_what_a_new_search_finds(first, monkeypatch):
    match = KVCache.match
    num_kept = 0

    def compared_match(cache, request, step):
        nonlocal num_kept
        num_kept += request in cache._search._found
        found = match(cache, request, step)
        if cache._shares_prefixes:
            has_tail = cache._host.find(request.request_id) is None
            search = PrefixSearch(cache._tree, cache.shape)
            assert found == search.match(request, step, has_tail=has_tail)
        return found

    monkeypatch.setattr(KVCache, "match", compared_match)
    for seed in range(first, first + 20):
        run(seed)
    assert num_kept > 20


def test_the_runs_cover_what_can_happen():
    stats = [run(seed).engine.stats() for seed in range(40)]
    assert sum(item.num_preemptions > 0 for item in stats) > 10
    assert sum(item.num_cached_tokens > 0 for item in stats) > 20
    assert sum(item.num_evictions > 0 for item in stats) > 10
    assert sum(item.num_offloaded_blocks > 0 for item in stats) > 3


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 6000, 100))
def test_every_query_finds_its_own_keys_in_many_runs(first):
    for seed in range(first, first + 100):
        run(seed)
