"""Several samples of one prompt: requests with a parent."""

from __future__ import annotations

from cbgen.engine.request import Request, RequestStatus
from tests.helpers.engine import make_request, scheduled_ids
from tests.helpers.shadow_run import ShadowRun, text

PROMPT = text(1, 50)


def family(count: int = 3, parent_id: str = "p", **params) -> list[Request]:
    """Return the samples of a prompt: the parent itself and its children."""
    return [
        make_request(parent_id, PROMPT, **params),
        *(
            make_request(f"{parent_id}#{number}", PROMPT, parent_id=parent_id, **params)
            for number in range(1, count)
        ),
    ]


def statuses(requests: list[Request]) -> list[RequestStatus]:
    return [request.status for request in requests]


def test_samples_share_their_prompt():
    run = ShadowRun(page_size=16)
    run.finish(*family(5, max_new_tokens=1))
    assert run.stats.num_computed_tokens == 50 + 4


def test_samples_hold_the_blocks_of_their_prompt_together():
    run = ShadowRun(page_size=16)
    run.add(*family(5))
    for _ in range(2):
        run.step()
    tables = [run.cache.block_table(name) for name in ("p", "p#1", "p#2", "p#3", "p#4")]
    assert len({table[:3] for table in tables}) == 1
    assert len({table[3] for table in tables}) == 5


def test_samples_run_on_in_blocks_of_their_own():
    run = ShadowRun(page_size=16)
    requests = family(3, max_new_tokens=40)
    run.finish(*requests)
    assert all(len(request.generated_tokens) == 40 for request in requests)


def test_samples_are_cancelled_with_their_parent():
    run = ShadowRun(page_size=16)
    requests = family(4)
    run.add(*requests)
    run.step()
    run.step()
    run.scheduler.cancel("p")
    run.scheduler.check()
    assert statuses(requests) == [RequestStatus.CANCELLED] * 4
    assert not run.scheduler.has_unfinished()
    assert run.stats.num_used_blocks == 0


def test_samples_that_wait_are_cancelled_with_their_parent():
    run = ShadowRun(page_size=16, max_requests=2)
    requests = family(4)
    run.add(*requests)
    run.step()
    run.step()
    assert run.stats.num_waiting == 2
    run.scheduler.cancel("p")
    run.scheduler.check()
    assert statuses(requests) == [RequestStatus.CANCELLED] * 4


def test_samples_are_cancelled_with_a_parent_that_has_ended():
    run = ShadowRun(page_size=16)
    parent, child = family(2)
    parent.params = make_request(max_new_tokens=1).params
    run.add(parent, child)
    run.step()
    run.step()
    assert parent.status is RequestStatus.FINISHED
    run.scheduler.cancel("p")
    assert child.status is RequestStatus.CANCELLED


def test_a_sample_alone_can_be_cancelled():
    run = ShadowRun(page_size=16)
    requests = family(3, max_new_tokens=5)
    run.add(*requests)
    run.step()
    run.step()
    run.scheduler.cancel("p#1")
    run.finish()
    assert statuses(requests) == [
        RequestStatus.FINISHED, RequestStatus.CANCELLED, RequestStatus.FINISHED,
    ]  # fmt: skip


def test_other_families_go_on_after_a_cancellation():
    run = ShadowRun(page_size=16)
    run.add(*family(2), *family(2, "q", max_new_tokens=3))
    run.step()
    run.step()
    run.scheduler.cancel("p")
    assert scheduled_ids(run.step()) == ["q", "q#1"]
