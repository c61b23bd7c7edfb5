"""The other order of a step: admitted prompts first, then decoding requests, then new ones."""

from __future__ import annotations

from cbgen.engine.scheduler.scheduler import Scheduler
from tests.helpers.engine import (
    make_request,
    make_scheduler,
    run_scheduler,
    scheduled_ids,
    take_step,
    token_counts,
)


def prefill_first(**options) -> Scheduler:
    return make_scheduler("prefill_first", **options)


def test_a_prompt_under_way_runs_before_decoding_requests():
    scheduler = prefill_first(max_batch_tokens=8)
    scheduler.add(make_request("old", 2))
    scheduler.add(make_request("new", 20))
    assert token_counts(take_step(scheduler)) == {"old": 2, "new": 6}
    assert token_counts(take_step(scheduler)) == {"new": 8}
    assert scheduled_ids(take_step(scheduler)) == ["new", "old"]


def test_a_waiting_prompt_comes_after_decoding_requests():
    scheduler = prefill_first(max_batch_tokens=8)
    scheduler.add(make_request("old", 2))
    take_step(scheduler)
    scheduler.add(make_request("new", 20))
    assert token_counts(take_step(scheduler)) == {"old": 1, "new": 7}


def test_decoding_requests_keep_their_order_among_themselves():
    scheduler = prefill_first()
    for name in "abc":
        scheduler.add(make_request(name, 2))
    take_step(scheduler)
    assert scheduled_ids(take_step(scheduler)) == ["a", "b", "c"]


def test_prompts_keep_their_order_among_themselves():
    scheduler = prefill_first(max_batch_tokens=16)
    for name in "ab":
        scheduler.add(make_request(name, 14))
    take_step(scheduler)
    scheduler.add(make_request("c", 30))
    assert token_counts(take_step(scheduler)) == {"b": 12, "a": 1, "c": 3}


def test_a_decoding_request_without_a_block_does_not_preempt_a_prompt_of_the_same_step():
    scheduler = prefill_first(num_blocks=6, page_size=4, max_batch_tokens=8)
    old, new = make_request("old", 4, max_new_tokens=4), make_request("new", 18, max_new_tokens=2)
    scheduler.add(old)
    scheduler.add(new)
    assert token_counts(take_step(scheduler)) == {"old": 4, "new": 4}
    assert token_counts(take_step(scheduler)) == {"new": 8}
    assert (old.num_preemptions, new.num_preemptions) == (0, 0)
    take_step(scheduler)
    assert (old.num_preemptions, new.num_preemptions) == (1, 0)


def test_all_requests_end_with_all_their_tokens():
    scheduler = prefill_first(num_blocks=6, page_size=4)
    requests = [make_request(str(i), 3 + i, max_new_tokens=12) for i in range(5)]
    run_scheduler(scheduler, requests, lambda item: item.start + item.num_tokens)
    assert scheduler.stats().num_preemptions > 0
    for request in requests:
        length = len(request.prompt_ids)
        assert request.generated_tokens == list(range(length, length + 12))
