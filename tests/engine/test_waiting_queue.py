"""Requests that wait: their order, and who may go before whom."""

from __future__ import annotations

import pytest

from cbgen.engine.scheduler.builder import BatchBuilder
from tests.helpers.engine import make_request, scheduled_ids
from tests.helpers.shadow_run import ShadowRun, text


def test_a_request_that_waits_for_a_prefix_lets_the_next_one_go_first():
    run = ShadowRun(page_size=16)
    run.add(
        make_request("a", text(1, 10) + text(2, 5)),
        make_request("same", text(1, 10) + text(3, 5)),
        make_request("other", text(4, 10)),
    )
    assert scheduled_ids(run.step()) == ["a", "other"]
    assert scheduled_ids(run.step())[-1] == "same"


def test_requests_that_wait_for_nothing_keep_their_order():
    run = ShadowRun(page_size=16, max_requests=3)
    run.add(
        make_request("a", [*text(1, 10), 2]),
        make_request("same", [*text(1, 10), 3], max_new_tokens=1),
        *(make_request(str(kind), text(kind, 10), max_new_tokens=1) for kind in range(4, 9)),
    )
    assert scheduled_ids(run.step()) == ["a", "4", "5"]
    assert scheduled_ids(run.step()) == ["a", "same", "6"]
    assert scheduled_ids(run.step()) == ["a", "7", "8"]


def test_all_that_wait_for_one_prefix_go_together_and_in_order():
    run = ShadowRun(page_size=16)
    for number in range(6):
        run.add(make_request(str(number), text(1, 10) + text(2 + number, 3)))
    assert scheduled_ids(run.step()) == ["0"]
    assert scheduled_ids(run.step()) == ["0", "1", "2", "3", "4", "5"]


def test_a_request_that_waits_for_a_long_prefix_is_not_starved_by_those_behind_it():
    run = ShadowRun(page_size=256, num_blocks=64, max_batch_tokens=40, max_requests=4)
    run.add(
        make_request("a", text(1, 200), max_new_tokens=1),
        make_request("same", [*text(1, 180), 2], max_new_tokens=1),
    )
    ended: list[str] = []
    for number in range(60):
        run.add(make_request(str(number), text(3 + number, 10), max_new_tokens=1))
        run.step()
        ended += [request.request_id for request in run.scheduler.take_finished()]
    # 200 tokens take five steps, and one more is waited for what the fifth one stored.
    assert ended.index("same") < 12


def test_a_request_without_room_is_not_overtaken_by_those_behind_it():
    run = ShadowRun(num_blocks=6)
    run.add(make_request("a", text(1, 12), max_new_tokens=3))
    run.step()
    run.add(make_request("big", text(2, 16), max_new_tokens=1), make_request("small", [3]))
    assert scheduled_ids(run.step()) == ["a"]
    assert scheduled_ids(run.step()) == ["a"]
    assert scheduled_ids(run.step()) == ["big", "small"]


@pytest.mark.parametrize(("num_waiting", "expected"), [(64, ["a", "other"]), (65, ["a"])])
def test_no_more_than_64_requests_are_passed_over_in_a_step(num_waiting, expected):
    run = ShadowRun(page_size=256, num_blocks=128, max_requests=2)
    run.add(make_request("a", text(1, 100)))
    for number in range(num_waiting):
        run.add(make_request(f"same {number}", [*text(1, 90), 1 + number]))
    run.add(make_request("other", [2]))
    assert scheduled_ids(run.step()) == expected


def test_what_waits_for_a_cancelled_request_computes_the_prefix_itself():
    run = ShadowRun(page_size=256, num_blocks=8, max_batch_tokens=40)
    run.add(
        make_request("a", text(1, 200)),
        make_request("same", [*text(1, 180), 2], max_new_tokens=1),
    )
    run.step()
    run.scheduler.cancel("a")
    (item,) = run.step().requests
    assert (item.request_id, item.start, item.num_tokens) == ("same", 40, 40)


def test_a_request_that_is_cancelled_while_it_waits_for_a_prefix_is_gone():
    run = ShadowRun(page_size=16)
    run.add(
        make_request("a", text(1, 10), max_new_tokens=5),
        make_request("same", [*text(1, 10), 2]),
    )
    run.step()
    run.scheduler.cancel("same")
    run.scheduler.check()
    run.add(make_request("same", [*text(1, 10), 3], max_new_tokens=5))
    assert scheduled_ids(run.step()) == ["a", "same"]
    assert len(run.finish()) == 3


def test_what_waits_for_a_request_that_is_preempted_is_woken():
    run = ShadowRun(page_size=16)
    for number in (2, 3):
        prompt = [*text(1, 10), number]
        run.add(make_request(f"with {number}", prompt, max_new_tokens=5))
    assert scheduled_ids(run.step()) == ["with 2"]
    run.scheduler._preempt(run.scheduler._active["with 2"], BatchBuilder(2, 256))
    run.scheduler.check()
    assert scheduled_ids(run.step()) == ["with 2", "with 3"]
    assert len(run.finish()) == 2


def test_requests_in_a_line_wait_once_and_then_compute_an_eighth_of_a_step_twice():
    """Each continues the one before it by 2 tokens, which is 8 tokens of 64 in a step: 2 + 4."""
    run = ShadowRun(page_size=16, num_blocks=64, max_batch_tokens=64, max_requests=32)
    whole = text(1, 15)
    for end in (1, 3, 5, 7, 9, 11, 13, 15):
        run.add(make_request(str(end), whole[:end], max_new_tokens=9))
    steps = [scheduled_ids(run.step()) for _ in range(4)]
    assert steps[0] == ["1"]
    assert steps[1][1:] == ["3", "5", "7"]
    assert steps[2][4:] == ["9", "11", "13"]
    assert steps[3][7:] == ["15"]


def test_whoever_has_waited_waits_again_for_many_tokens():
    run = ShadowRun(page_size=256, num_blocks=64, max_batch_tokens=256, max_requests=32)
    whole = text(1, 140)
    for end in (20, 80, 140):
        run.add(make_request(str(end), whole[:end], max_new_tokens=9))
    assert [scheduled_ids(run.step())[-1] for _ in range(3)] == ["20", "80", "140"]
    assert run.stats.num_computed_tokens == 140 + 2 + 1


@pytest.mark.parametrize("count", [2, 5])
def test_requests_that_jointly_outgrow_the_cache_all_finish(count):
    run = ShadowRun(num_blocks=7)
    requests = [make_request(str(i), text(1 + i, 8), max_new_tokens=18) for i in range(count)]
    assert len(run.finish(*requests)) == count
    assert run.stats.num_preemptions > 0


def test_a_prompt_larger_than_the_cache_fails_alone():
    run = ShadowRun(num_blocks=7)
    run.add(
        make_request("a", text(1, 8), max_new_tokens=9),
        make_request("big", text(2, 29), max_new_tokens=1),
        make_request("b", text(3, 8), max_new_tokens=9),
    )
    ended = {request.request_id: request for request in run.finish()}
    assert ended["big"].error_code == "prompt_exceeds_cache"
    assert len(ended["a"].generated_tokens) == len(ended["b"].generated_tokens) == 9
