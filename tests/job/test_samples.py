"""Rows of several samples: their requests, and the job that answers such rows."""

from __future__ import annotations

import queue
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbgen.engine.request import FinishReason, RequestStatus
from cbgen.job.batch_job import RowInFlight
from cbgen.job.preparer import request_ids
from tests.helpers.jobs import make_stub_job, records_of, token_rows

SAMPLING = {"temperature": 1.0, "num_return_sequences": 3}


def sampling_job(num_samples=3, **options):
    generation = {**SAMPLING, "num_return_sequences": num_samples}
    return make_stub_job(generation=generation, **options)


def prepared(rows, **options):
    preparer = sampling_job(**options).preparer
    return preparer, preparer.prepare(list(records_of(rows)))


def test_a_single_sample_has_the_id_of_its_row():
    assert request_ids("a", 1) == ["a"]
    assert request_ids("", 1) == [""]


def test_several_samples_are_numbered():
    assert request_ids("a", 3) == ["a#0", "a#1", "a#2"]


ROW_IDS = st.text(alphabet="a#01٣\n", max_size=6)


@given(counts=st.dictionaries(ROW_IDS, st.integers(1, 12), max_size=8))
def test_no_two_requests_share_an_id_whatever_the_ids_of_rows_are(counts):
    ids = [name for row_id, count in counts.items() for name in request_ids(row_id, count)]
    assert len(set(ids)) == len(ids)


def test_requests_of_a_row_differ_in_id_and_seed_alone():
    _, (row,) = prepared([{"id": "a", "prompt_token_ids": [5, 6]}])
    assert [request.request_id for request in row.requests] == ["a#0", "a#1", "a#2"]
    assert len({request.params.seed for request in row.requests}) == 3
    assert [request.prompt_ids for request in row.requests] == [[5, 6]] * 3


def test_prompts_with_a_common_beginning_run_side_by_side():
    prompts = {"a": [9, 1], "b": [5, 7, 1], "c": [9], "d": [5, 7, 0], "e": [6]}
    rows = [{"id": name, "prompt_token_ids": prompt} for name, prompt in prompts.items()]
    preparer, ready = prepared(rows, num_samples=1, shares_prefixes=True)
    ordered = [request.request_id for request in preparer.submission(ready)]
    assert ordered == ["d", "b", "e", "c", "a"]


def test_samples_of_a_row_stay_together_even_beside_a_row_with_the_same_prompt():
    rows = [{"id": name, "prompt_token_ids": [4, 5]} for name in "ba"]
    preparer, ready = prepared(rows, num_samples=2, shares_prefixes=True)
    ordered = [request.request_id for request in preparer.submission(ready)]
    assert ordered == ["b#0", "b#1", "a#0", "a#1"]


@pytest.mark.parametrize(
    ("shares_prefixes", "expected"), [(True, ["2", "0", "1"]), (False, ["0", "1", "2"])]
)
def test_requests_are_sorted_where_blocks_are_shared(shares_prefixes, expected):
    rows = [{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7]}, {"prompt_token_ids": [5, 3]}]
    preparer, ready = prepared(rows, num_samples=1, shares_prefixes=shares_prefixes)
    assert [request.request_id for request in preparer.submission(ready)] == expected
    assert [str(row.record.index) for row in ready] == ["0", "1", "2"]


def test_bad_rows_have_no_requests_to_sort():
    preparer, ready = prepared([{"nothing": 1}, {"prompt_token_ids": [5]}], shares_prefixes=True)
    assert len(preparer.submission(ready)) == 3


def test_outputs_are_in_the_order_of_the_samples_whichever_ends_first():
    _, (row,) = prepared([{"prompt_token_ids": [5]}])
    in_flight = RowInFlight(row)
    for request in row.requests:
        request.finish(RequestStatus.FINISHED, FinishReason.STOP)
    for sample in (2, 0, 1):
        assert not in_flight.is_complete
        in_flight.take(row.requests[sample].output(), cancel=print)
    assert in_flight.is_complete
    assert [output.request_id for output in in_flight.outputs] == ["0#0", "0#1", "0#2"]


def test_every_row_has_as_many_choices_as_samples():
    stub = sampling_job()
    rows = dict(stub.job.rows(records_of(token_rows(100))))
    assert sorted(rows) == list(range(100))
    assert {len(row["choices"]) for row in rows.values()} == {3}
    assert rows[7]["usage"] == {"prompt_tokens": 1, "completion_tokens": 6}
    assert stub.statistics.rows_answered == 100
    assert stub.statistics.num_answers == stub.statistics.finish_reasons["stop"] == 300
    assert (stub.statistics.prompt_tokens, stub.statistics.completion_tokens) == (100, 600)


def test_a_row_is_given_when_its_last_sample_has_ended():
    stub = sampling_job()
    stub.engine.holds = lambda request: request.request_id == "0#1"
    given_rows = stub.job.rows(records_of(token_rows(20)))
    first = [next(given_rows)[0] for _ in range(19)]
    assert 0 not in first
    stub.engine.finish(stub.engine.held)
    assert [index for index, _ in given_rows] == [0]


def test_a_sample_that_fails_makes_its_row_an_error_and_ends_the_others():
    stub = sampling_job()
    stub.engine.holds = lambda request: request.request_id in ("0#1", "0#2")
    given_rows = stub.job.rows(records_of(token_rows(5)))
    answered = dict(next(given_rows) for _ in range(4))
    stub.engine.fail(stub.engine.held[1])
    consumer, last = collect(given_rows)
    consumer.join(10)
    ((index, row),) = last
    assert (index, row["error"]["code"], row["text"]) == (0, "non_finite_logits", None)
    assert "choices" not in row
    assert stub.engine.cancelled == ["0#1"]
    assert all(other["error"] is None for other in answered.values())
    assert dict(stub.statistics.errors) == {"non_finite_logits": 1}


def test_an_early_stop_drops_a_row_whose_samples_have_not_all_ended():
    stub = sampling_job()
    stub.engine.holds = lambda request: request.request_id == "0#1"
    given_rows = stub.job.rows(records_of(token_rows(3)))
    assert {next(given_rows)[0] for _ in range(2)} == {1, 2}
    stub.job.stop_early()
    assert list(given_rows) == []
    assert not stub.job.is_complete


def test_an_early_stop_keeps_a_row_that_has_failed():
    stub = sampling_job()
    stub.engine.holds = lambda request: request.request_id in ("0#1", "0#2")
    given_rows = stub.job.rows(records_of(token_rows(2)))
    assert next(given_rows)[0] == 1
    stub.engine.fail(stub.engine.held[0])
    stub.job.stop_early()
    assert [row["error"]["code"] for _, row in given_rows] == ["non_finite_logits"]


def test_a_cancelled_sample_ends_the_others_of_its_row():
    _, (row,) = prepared([{"prompt_token_ids": [5]}])
    cancelled: list[str] = []
    in_flight = RowInFlight(row)
    row.requests[1].finish(RequestStatus.CANCELLED, FinishReason.CANCELLED)
    in_flight.take(row.requests[1].output(), cancelled.append)
    assert not in_flight.is_complete
    assert cancelled == ["0#0", "0#2"]


def test_rows_of_many_samples_wait_until_few_requests_run():
    """Ten in flight and a hundred samples a row: no row begins while ten requests or more run."""
    stub = sampling_job(num_samples=100, max_in_flight=10)
    stub.engine.holds = lambda request: True
    unfinished: list[int] = []
    pending: queue.SimpleQueue = queue.SimpleQueue()
    taken = threading.Event()
    submit, stats = stub.engine.submit, stub.engine.stats

    def submit_and_count(requests):
        unfinished.append(sum(not request.is_finished for request in stub.engine.held))
        submit(requests)
        for request in requests:
            pending.put(request)

    def stats_and_tell():
        taken.set()  # the job asks for them whenever it has taken outputs
        return stats()

    def finish_one_by_one():
        while (request := pending.get()) is not None:
            taken.clear()
            stub.engine.finish([request])
            taken.wait(10)

    stub.engine.submit, stub.engine.stats = submit_and_count, stats_and_tell
    worker = threading.Thread(target=finish_one_by_one, daemon=True)
    worker.start()
    assert len(list(stub.job.rows(records_of(token_rows(30))))) == 30
    pending.put(None)
    worker.join(10)
    assert max(unfinished) < 10


def test_samples_that_have_ended_make_room_before_their_row_is_complete():
    stub = sampling_job(num_samples=10, max_in_flight=10)
    stub.engine.holds = lambda request: request.request_id.endswith("#9")
    held_all = threading.Event()
    submit = stub.engine.submit

    def submit_and_tell(requests):
        submit(requests)
        if len(stub.engine.held) == 5:
            held_all.set()

    stub.engine.submit = submit_and_tell
    consumer, given_rows = collect(stub.job.rows(records_of(token_rows(5))))
    assert held_all.wait(10)  # five rows of ten samples, all but one of which have ended
    stub.engine.finish(stub.engine.held)
    consumer.join(10)
    assert len(given_rows) == 5


def collect(rows):
    """Take the rows of a job on a thread, so that a test can give up waiting for them."""
    collected: list = []
    thread = threading.Thread(target=lambda: collected.extend(rows), daemon=True)
    thread.start()
    return thread, collected
