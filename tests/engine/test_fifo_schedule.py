"""What a step runs: order, budget, chunks, rows and blocks."""

from __future__ import annotations

import pytest

from cbgen.engine.request import RequestStatus
from tests.helpers.engine import (
    answer,
    make_plan,
    make_request,
    make_scheduler,
    run_scheduler,
    scheduled_ids,
    take_step,
    token_counts,
)


def test_a_prompt_that_fits_the_budget_runs_in_one_step():
    scheduler = make_scheduler(max_batch_tokens=16)
    scheduler.add(make_request("a", 10))
    batch = scheduler.schedule()
    assert token_counts(batch) == {"a": 10}
    assert batch.num_tokens == 10


def test_a_long_prompt_runs_in_chunks_of_the_budget():
    scheduler = make_scheduler(max_batch_tokens=8)
    scheduler.add(make_request("a", 20))
    chunks = [take_step(scheduler).requests[0] for _ in range(3)]
    assert [(chunk.start, chunk.num_tokens) for chunk in chunks] == [(0, 8), (8, 8), (16, 4)]


def test_only_the_last_chunk_wants_logits_and_a_sample():
    scheduler = make_scheduler(max_batch_tokens=8)
    scheduler.add(make_request("a", 20))
    chunks = [take_step(scheduler).requests[0] for _ in range(3)]
    assert [chunk.num_logits for chunk in chunks] == [0, 0, 1]
    assert [chunk.num_samples for chunk in chunks] == [0, 0, 1]


def test_a_request_is_prefilling_until_its_first_token():
    scheduler = make_scheduler(max_batch_tokens=8)
    request = make_request("a", 12)
    scheduler.add(request)
    take_step(scheduler)
    assert request.status is RequestStatus.PREFILLING
    take_step(scheduler)
    assert request.status is RequestStatus.DECODING


def test_a_decoding_request_runs_one_token_at_its_position():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5))
    take_step(scheduler)
    item = scheduler.schedule().requests[0]
    assert (item.start, item.num_tokens, item.num_samples) == (5, 1, 1)


def test_several_prompts_share_a_step():
    scheduler = make_scheduler(max_batch_tokens=16)
    for name, length in (("a", 3), ("b", 4), ("c", 5)):
        scheduler.add(make_request(name, length))
    assert token_counts(scheduler.schedule()) == {"a": 3, "b": 4, "c": 5}


def test_the_last_prompt_of_a_step_is_cut_at_the_budget():
    scheduler = make_scheduler(max_batch_tokens=8)
    scheduler.add(make_request("a", 5))
    scheduler.add(make_request("b", 5))
    assert token_counts(scheduler.schedule()) == {"a": 5, "b": 3}


def test_a_prompt_that_uses_up_the_budget_lets_the_next_one_wait():
    scheduler = make_scheduler(max_batch_tokens=8)
    scheduler.add(make_request("a", 8))
    scheduler.add(make_request("b", 3))
    assert scheduled_ids(scheduler.schedule()) == ["a"]
    assert scheduler.stats().num_waiting == 1


def test_a_step_never_runs_more_tokens_than_the_budget():
    scheduler = make_scheduler(max_batch_tokens=8, max_requests=4)
    for number in range(9):
        scheduler.add(make_request(str(number), 1 + 3 * number, max_new_tokens=5))
    while scheduler.has_unfinished():
        batch = take_step(scheduler)
        assert batch.num_tokens == sum(item.num_tokens for item in batch.requests) <= 8


def test_decoding_requests_run_before_prompts():
    scheduler = make_scheduler(max_batch_tokens=8)
    scheduler.add(make_request("old", 20))
    for _ in range(2):
        take_step(scheduler)
    scheduler.add(make_request("new", 20))
    take_step(scheduler)  # the end of `old`, the beginning of `new`
    assert scheduled_ids(scheduler.schedule()) == ["old", "new"]


def test_a_started_prompt_runs_before_a_waiting_one():
    scheduler = make_scheduler(max_batch_tokens=8)
    scheduler.add(make_request("a", 12))
    scheduler.add(make_request("b", 12))
    take_step(scheduler)
    assert token_counts(take_step(scheduler)) == {"a": 4, "b": 4}


def test_requests_are_admitted_in_order_of_arrival():
    scheduler = make_scheduler(max_requests=2)
    for name in "abcd":
        scheduler.add(make_request(name, 2, max_new_tokens=2))
    assert scheduled_ids(take_step(scheduler)) == ["a", "b"]
    take_step(scheduler)
    assert scheduled_ids(take_step(scheduler)) == ["c", "d"]


def test_no_more_requests_are_admitted_than_there_are_rows():
    scheduler = make_scheduler(max_requests=3)
    for number in range(8):
        scheduler.add(make_request(str(number), 1))
    take_step(scheduler)
    assert scheduler.stats().num_running == 3
    assert scheduler.stats().num_waiting == 5


def test_admitted_requests_have_rows_of_their_own():
    scheduler = make_scheduler(max_requests=3)
    for name in "abc":
        scheduler.add(make_request(name, 2))
    batch = scheduler.schedule()
    assert sorted(item.row for item in batch.requests) == [0, 1, 2]
    assert [item.row for item in batch.admitted] == [item.row for item in batch.requests]


def test_a_request_keeps_its_row_until_its_end():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 2))
    scheduler.add(make_request("b", 2))
    rows = [[item.row for item in take_step(scheduler).requests] for _ in range(4)]
    assert rows[0] == rows[1] == rows[2] == rows[3]


def test_an_admission_hands_over_prompt_and_parameters():
    scheduler = make_scheduler()
    request = make_request("a", [5, 6, 7], temperature=0.5)
    scheduler.add(request)
    (row,) = scheduler.schedule().admitted
    assert list(row.prompt_ids) == [5, 6, 7]
    assert row.params is request.params


def test_an_admission_takes_the_blocks_of_the_whole_prompt():
    scheduler = make_scheduler(page_size=4, max_batch_tokens=8)
    scheduler.add(make_request("a", 20))
    (blocks,) = scheduler.schedule().new_blocks
    assert (blocks.first, len(blocks.block_ids)) == (0, 5)


def test_a_decoding_request_takes_a_block_only_at_a_page_border():
    scheduler = make_scheduler(page_size=4)
    scheduler.add(make_request("a", 3))
    firsts = [[new.first for new in take_step(scheduler).new_blocks] for _ in range(7)]
    assert firsts == [[0], [], [1], [], [], [], [2]]


def test_a_prompt_without_room_waits_until_blocks_are_free():
    scheduler = make_scheduler(num_blocks=4, page_size=4)
    scheduler.add(make_request("a", 12, max_new_tokens=2))
    scheduler.add(make_request("b", 8, max_new_tokens=1))
    assert scheduled_ids(take_step(scheduler)) == ["a"]
    assert scheduled_ids(take_step(scheduler)) == ["a"]
    assert scheduled_ids(take_step(scheduler)) == ["b"]


def test_a_prompt_without_room_is_not_overtaken():
    scheduler = make_scheduler(num_blocks=4, page_size=4)
    scheduler.add(make_request("a", 8))
    scheduler.add(make_request("big", 12))
    scheduler.add(make_request("small", 1))
    assert scheduled_ids(take_step(scheduler)) == ["a"]


def test_the_margin_holds_back_admissions_beside_running_requests():
    scheduler = make_scheduler(num_blocks=10, page_size=4, safety_margin=0.5, max_batch_tokens=64)
    for name in "abc":
        scheduler.add(make_request(name, 12))
    assert scheduled_ids(take_step(scheduler)) == ["a", "b"]
    assert scheduler.stats().num_used_blocks == 6


def test_the_margin_never_holds_back_a_request_that_is_alone():
    scheduler = make_scheduler(num_blocks=4, page_size=4, safety_margin=1.0)
    scheduler.add(make_request("a", 12, max_new_tokens=2))
    scheduler.add(make_request("b", 12, max_new_tokens=2))
    assert [request.request_id for request in run_scheduler(scheduler)] == ["a", "b"]


def test_steps_are_numbered_from_one():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 2, max_new_tokens=3))
    assert [take_step(scheduler).step for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("num_blocks", [5, 6, 9])
@pytest.mark.parametrize("safety_margin", [0.0, 0.15, 1.0])
@pytest.mark.parametrize("shares_prefixes", [False, True])
@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
def test_no_step_is_empty_while_requests_are_unfinished(
    num_blocks, safety_margin, shares_prefixes, scheduler_type
):
    scheduler = make_scheduler(
        scheduler_type=scheduler_type,
        num_blocks=num_blocks,
        safety_margin=safety_margin,
        shares_prefixes=shares_prefixes,
        max_batch_tokens=8,
    )
    for number in range(12):
        scheduler.add(make_request(str(number), 1 + number, max_new_tokens=1 + number % 7))
    while scheduler.has_unfinished():
        assert take_step(scheduler).num_tokens > 0


def test_stats_count_what_has_run():
    scheduler = make_scheduler(num_blocks=16, page_size=4)
    run_scheduler(scheduler, [make_request("a", 5, max_new_tokens=4)])
    stats = scheduler.stats()
    assert (stats.num_steps, stats.num_computed_tokens, stats.num_generated_tokens) == (4, 8, 4)
    assert (stats.num_blocks, stats.num_used_blocks, stats.peak_used_blocks) == (16, 0, 2)
    assert (stats.num_waiting, stats.num_running, stats.num_preemptions) == (0, 0, 0)


def test_two_steps_may_be_scheduled_before_the_first_result():
    scheduler = make_scheduler()
    request = make_request("a", 4, max_new_tokens=2)
    scheduler.add(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.requests[0].start == 4
    scheduler.update(first, answer(first, lambda item: 8))
    scheduler.update(second, answer(second, lambda item: 9))
    assert request.generated_tokens == [8, 9]


def test_nothing_is_scheduled_behind_the_last_token_of_an_answer():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4, max_new_tokens=1))
    first = scheduler.schedule()
    assert scheduler.schedule().requests == ()
    scheduler.update(first, answer(first))
    assert not scheduler.has_unfinished()


def test_more_rows_than_tokens_a_step_are_refused():
    with pytest.raises(ValueError, match=r"max_requests \(9\) must not exceed max_batch_tokens"):
        make_plan(max_requests=9, max_batch_tokens=8)
