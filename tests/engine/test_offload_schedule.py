"""Preempted requests whose blocks go to host memory, and come back."""

from __future__ import annotations

from dataclasses import fields

import pytest

from cbgen.engine.cache.groups import AttentionSpan
from cbgen.engine.cache.kv_cache import KVCache
from cbgen.engine.request import Request, RequestStatus
from cbgen.engine.step import ScheduledBatch
from tests.helpers.engine import make_cache, make_request, place, scheduled_ids
from tests.helpers.shadow_run import ShadowRun, text


def crowded(num_requests: int = 4, num_blocks: int = 8, **options) -> ShadowRun:
    """Return a run of requests that grow to four blocks each, where only two have room."""
    run = ShadowRun(num_blocks=num_blocks, max_requests=num_requests, **options)
    for number in range(num_requests):
        run.add(make_request(str(number), text(1 + number, 6), max_new_tokens=10))
    return run


def preempt(run: ShadowRun) -> list[Request]:
    """Step until requests have been preempted; return them, the next to be admitted first."""
    while not run.stats.num_preemptions:
        run.step()
    waiting = [request for request in run.scheduler.unfinished() if request.num_preemptions]
    return sorted(waiting, key=lambda request: request.admission)


@pytest.mark.parametrize("shares_prefixes", [False, True])
@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
def test_a_restored_request_computes_nothing_again(scheduler_type, shares_prefixes):
    run = crowded(
        scheduler_type=scheduler_type, shares_prefixes=shares_prefixes, num_host_blocks=64
    )
    assert len(run.finish()) == 4
    assert run.stats.num_preemptions > 0
    assert run.stats.num_recomputed_tokens == 0
    assert run.stats.num_computed_tokens == 4 * (6 + 10 - 1)


def test_without_host_memory_what_is_lost_is_computed_again():
    run = crowded(shares_prefixes=False)
    assert len(run.finish()) == 4
    assert run.stats.num_offloaded_blocks == 0
    recomputed = run.stats.num_recomputed_tokens
    assert recomputed > 0
    assert run.stats.num_computed_tokens == 4 * (6 + 10 - 1) + recomputed


def test_a_preemption_moves_the_blocks_out_before_they_are_used_again():
    run = crowded(shares_prefixes=False, num_host_blocks=64)
    tables: dict[str, tuple[int, ...]] = {}
    while not run.stats.num_preemptions:
        tables = {str(i): run.cache.block_table(str(i)) for i in range(4)}
        batch = run.step()
    lost = [r.request_id for r in run.scheduler.unfinished() if r.num_preemptions]
    moved = sorted(swap.device_block for swap in batch.swaps_out)
    assert moved == sorted(block for name in lost for block in tables[name])
    assert run.stats.num_offloaded_blocks == len(moved)


def test_a_restored_request_goes_on_at_its_next_token():
    run = crowded(shares_prefixes=False, num_host_blocks=64)
    victim = preempt(run)[0]
    known = victim.num_known_tokens
    while victim.row < 0:
        batch = run.step()
    item = next(item for item in batch.requests if item.request_id == victim.request_id)
    assert (item.start, item.num_tokens) == (known - 1, 1)
    restored = {swap.device_block for swap in batch.swaps_in}
    assert restored >= set(run.cache.block_table(victim.request_id)[: -(-(known - 1) // 4)])


def test_the_middle_of_a_prompt_is_restored_too():
    run = ShadowRun(num_blocks=12, max_batch_tokens=9, shares_prefixes=False, num_host_blocks=64)
    old = make_request("old", text(1, 8), max_new_tokens=12)
    new = make_request("new", text(2, 38), max_new_tokens=2)
    run.finish(old, new)
    assert new.num_preemptions == 1
    assert run.stats.num_recomputed_tokens == 0


def test_blocks_of_a_shared_prefix_are_not_restored():
    run = ShadowRun(num_blocks=11, num_host_blocks=64)
    prefix = text(1, 12)
    for number in range(3):
        prompt = prefix + text(2 + number, 2)
        run.add(make_request(str(number), prompt, max_new_tokens=18))
    victim = preempt(run)[0]
    assert run.stats.num_offloaded_blocks > 3
    while victim.row < 0:
        batch = run.step()
    shared = set(run.cache.block_table(victim.request_id)[:3])
    assert batch.swaps_in
    assert not shared & {swap.device_block for swap in batch.swaps_in}


def test_blocks_that_nobody_took_meanwhile_are_not_restored():
    run = ShadowRun(num_blocks=5, num_host_blocks=64)
    run.add(make_request("a", text(1, 8), max_new_tokens=9))
    run.add(make_request("b", text(2, 8), max_new_tokens=9))
    (victim,) = preempt(run)
    run.scheduler.cancel("a")
    batch = run.step()
    assert scheduled_ids(batch) == [victim.request_id]
    assert len(batch.swaps_in) < 2


def test_a_full_host_pool_leaves_the_rest_to_be_computed_again():
    run = crowded(shares_prefixes=False, num_host_blocks=2)
    assert len(run.finish()) == 4
    assert run.stats.num_offloaded_blocks > 0
    assert run.stats.num_recomputed_tokens > 0


def test_a_host_pool_too_small_for_any_request_stays_empty():
    run = crowded(shares_prefixes=False, num_host_blocks=1)
    assert len(run.finish()) == 4
    assert run.stats.num_offloaded_blocks == 0


def test_a_request_of_one_token_has_nothing_to_keep():
    cache = make_cache(num_host_blocks=4)
    request = make_request("a", [1])
    place(cache, request)
    request.num_tokens, request.num_computed_tokens = 2, 1
    assert cache.offload(request) is None
    assert cache._host.find("a") is None


def test_windowed_groups_restore_what_their_windows_see():
    spans = (AttentionSpan(), AttentionSpan(window=5))
    run = crowded(num_blocks=18, spans=spans, num_host_blocks=64, shares_prefixes=False)
    assert len(run.finish()) == 4
    assert run.stats.num_preemptions > 0
    assert run.stats.num_recomputed_tokens == 0


def test_a_finished_run_leaves_nothing_in_the_host_pool():
    run = crowded(num_host_blocks=64)
    run.finish()
    assert run.stats.num_offloaded_blocks > 0
    assert run.cache._host.num_free == 64


def test_cancelling_a_request_in_the_host_pool_frees_its_blocks_there():
    run = crowded(num_host_blocks=64)
    for victim in preempt(run):
        run.scheduler.cancel(victim.request_id)
    run.scheduler.check()
    assert run.stats.num_offloaded_blocks > 0
    assert run.cache._host.num_free == 64


def test_a_cancelled_request_in_the_host_pool_keeps_its_tokens():
    run = crowded(num_host_blocks=64)
    victim = preempt(run)[0]
    run.scheduler.cancel(victim.request_id)
    assert victim.status is RequestStatus.CANCELLED
    assert victim.generated_tokens


@pytest.mark.parametrize("num_host_blocks", [0, 64])
@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
def test_cancelling_all_that_run_after_a_preemption_lets_the_waiting_ones_run(
    num_host_blocks, scheduler_type
):
    run = crowded(scheduler_type=scheduler_type, num_host_blocks=num_host_blocks)
    run.add(make_request("late", text(60, 6), max_new_tokens=3))
    victims = preempt(run)
    for request in run.scheduler.unfinished():
        if request.row >= 0:
            run.scheduler.cancel(request.request_id)
    batch = run.step()
    assert scheduled_ids(batch)[: len(victims)] == [victim.request_id for victim in victims]
    run.finish()


def test_a_block_that_is_copied_from_may_be_filled_from_the_host_in_the_same_step():
    """So copies are made first: what a step does is done in the order of its fields."""
    cache = make_cache(num_blocks=2, page_size=16, num_host_blocks=1)
    restored = make_request("restored", text(1, 12))
    place(cache, restored)
    restored.num_computed_tokens = 10
    cache.offload(restored)
    cache.free(restored)
    restored.preempt()
    for kind in (2, 3):
        earlier = make_request(str(kind), text(kind, 16))
        place(cache, earlier)
        earlier.num_computed_tokens = 16
        cache.free(earlier)
    (copy,) = place(cache, make_request("copying", [*text(3, 8), 9]), 2).copies
    (swap,) = place(cache, restored, 2).swaps_in
    assert swap.device_block == copy.source
    order = [field.name for field in fields(ScheduledBatch)]
    assert order.index("swaps_out") < order.index("block_copies") < order.index("swaps_in")


def test_a_request_whose_window_has_passed_a_token_that_is_lost_is_computed_again():
    """Only with two steps in flight: the token behind the last known one is not there yet."""
    cache = make_cache(
        num_blocks=9, spans=(AttentionSpan(chunk=8), AttentionSpan()), num_host_blocks=9
    )
    request = make_request("a", text(1, 16))
    place(cache, request)
    request.num_tokens, request.num_computed_tokens = 17, 16
    assert cache.grow(request, 16) is not None  # a new chunk begins
    assert cache.offload(request) is None


def one_step_in_flight() -> tuple[KVCache, Request]:
    """Return a request whose last known token has run, and whose next one is not known yet."""
    cache = make_cache(num_blocks=9, num_host_blocks=9)
    request = make_request("a", text(1, 16))
    place(cache, request)
    request.num_tokens, request.num_computed_tokens = 17, 16
    return cache, request


def test_a_request_with_a_step_in_flight_is_restored_without_its_last_token():
    cache, request = one_step_in_flight()
    assert cache.offload(request) is not None
    cache.free(request)
    request.preempt()
    cache._tree.clear()  # as if its blocks had been evicted
    place(cache, request, 2)
    assert request.num_computed_tokens == 15


def test_keys_of_old_weights_do_not_come_back_from_the_host():
    cache, request = one_step_in_flight()
    assert cache.offload(request) is not None
    cache.free(request)
    request.preempt()
    cache.reset_prefixes()
    place(cache, request, 2)
    assert request.num_computed_tokens == 0


def test_keys_of_old_weights_are_not_offloaded():
    cache, request = one_step_in_flight()
    cache.reset_prefixes()
    assert cache.offload(request) is None
