"""Requests that jointly outgrow the cache: who gives way, and what becomes of it."""

from __future__ import annotations

from cbgen.engine.request import FinishReason, RequestStatus
from tests.helpers.engine import (
    answer,
    make_request,
    make_scheduler,
    run_scheduler,
    scheduled_ids,
    take_step,
)


def crowded(names: str = "abc", **limits):
    """Return a scheduler whose requests hold one block each, all there are, and all full."""
    scheduler = make_scheduler(num_blocks=len(names), page_size=4, **limits)
    requests = {name: make_request(name, 4) for name in names}
    for request in requests.values():
        scheduler.add(request)
    take_step(scheduler)
    return scheduler, requests


def count_up(item) -> int:
    """Sample a token that depends on the position alone."""
    return item.start + item.num_tokens


def test_the_newest_request_is_preempted_first():
    scheduler, requests = crowded("abc")
    assert scheduled_ids(scheduler.schedule()) == ["a"]
    assert [requests[name].num_preemptions for name in "abc"] == [0, 1, 1]


def test_only_as_many_are_preempted_as_blocks_are_missing():
    scheduler, requests = crowded("abcd")
    assert scheduled_ids(scheduler.schedule()) == ["a", "b"]
    assert [requests[name].num_preemptions for name in "abcd"] == [0, 0, 1, 1]


def test_a_preempted_request_gives_back_row_and_blocks():
    scheduler, requests = crowded("ab")
    scheduler.schedule()
    assert requests["b"].row == -1
    assert requests["b"].num_computed_tokens == 0
    assert requests["b"].status is RequestStatus.PENDING
    assert scheduler.stats().num_running == 1


def test_a_preempted_request_goes_before_those_that_waited_longer():
    scheduler, _ = crowded("ab")
    scheduler.add(make_request("late", 1))
    take_step(scheduler)
    scheduler.cancel("a")
    assert scheduled_ids(scheduler.schedule())[0] == "b"


def test_requests_preempted_together_keep_their_order():
    scheduler, _ = crowded("abcd")
    take_step(scheduler)  # c and d give way
    scheduler.cancel("a")
    scheduler.cancel("b")
    assert scheduled_ids(scheduler.schedule()) == ["c", "d"]


def test_a_prompt_in_the_middle_is_preempted_too():
    scheduler = make_scheduler(num_blocks=5, page_size=4, max_batch_tokens=8)
    old, new = make_request("old", 4), make_request("new", 16)
    scheduler.add(old)
    scheduler.add(new)
    take_step(scheduler)
    assert scheduled_ids(take_step(scheduler)) == ["old"]
    assert (new.num_preemptions, new.generated_tokens) == (1, [])


def test_a_readmitted_request_computes_prompt_and_answer_again():
    scheduler, requests = crowded("ab")
    take_step(scheduler)
    scheduler.cancel("a")
    batch = scheduler.schedule()
    (row,) = batch.admitted
    assert list(row.prompt_ids) == requests["b"].prompt_ids
    assert list(row.generated_tokens) == requests["b"].generated_tokens
    assert (batch.requests[0].start, batch.requests[0].num_tokens) == (0, 5)


def test_the_tokens_to_compute_again_are_counted():
    scheduler, _ = crowded("ab")
    take_step(scheduler)
    assert scheduler.stats().num_preemptions == 1
    assert scheduler.stats().num_recomputed_tokens == 0
    scheduler.cancel("a")
    scheduler.schedule()
    assert scheduler.stats().num_recomputed_tokens == 4


def test_all_requests_end_with_all_their_tokens():
    scheduler = make_scheduler(num_blocks=6, page_size=4)
    requests = [make_request(str(i), 3 + i, max_new_tokens=12) for i in range(5)]
    ended = run_scheduler(scheduler, requests, count_up)
    assert scheduler.stats().num_preemptions > 0
    assert len(ended) == 5
    for request in requests:
        length = len(request.prompt_ids)
        assert request.generated_tokens == list(range(length, length + 12))


def test_log_probabilities_stay_as_many_as_tokens_after_a_preemption():
    scheduler = make_scheduler(num_blocks=4, page_size=4)
    requests = [make_request(str(i), 3, max_new_tokens=9, logprobs="raw") for i in range(4)]
    run_scheduler(scheduler, requests)
    assert scheduler.stats().num_preemptions > 0
    assert [len(request.logprobs) for request in requests] == [9, 9, 9, 9]


def test_a_preempted_request_can_be_cancelled_and_keeps_its_tokens():
    scheduler, requests = crowded("ab")
    take_step(scheduler)
    scheduler.cancel("b")
    scheduler.check()
    assert requests["b"].finish_reason is FinishReason.CANCELLED
    assert requests["b"].generated_tokens == [7]


def test_the_result_of_a_step_before_the_preemption_is_dropped():
    scheduler, requests = crowded("ab")
    running = scheduler.schedule()  # b gives way here
    scheduler.update(running, answer(running))
    assert requests["b"].generated_tokens == [7]
    assert requests["a"].generated_tokens == [7, 7]


def test_a_result_for_an_older_admission_is_dropped():
    scheduler = make_scheduler(num_blocks=2, page_size=4)
    old, young = make_request("old", 3), make_request("young", 3)
    scheduler.add(old)
    scheduler.add(young)
    take_step(scheduler)
    late = scheduler.schedule()  # both run a fourth token, which is the end of their pages
    scheduler.schedule()  # old needs a second page, and young gives way
    scheduler.cancel("old")
    again = scheduler.schedule()  # young is admitted anew
    assert scheduled_ids(again) == ["young"]
    scheduler.update(late, answer(late, lambda item: 99))
    assert young.generated_tokens == [7]
    scheduler.update(again, answer(again, lambda item: 8))
    assert young.generated_tokens == [7, 8]
    scheduler.check()


def test_a_request_alone_may_fill_the_cache_to_its_last_slot():
    scheduler = make_scheduler(num_blocks=3, page_size=4)
    (request,) = run_scheduler(scheduler, [make_request("a", 4, max_new_tokens=9)])
    assert len(request.generated_tokens) == 9
    assert scheduler.stats().num_preemptions == 0
    assert scheduler.stats().peak_used_blocks == 3
