"""A job that is asked to end early: what is finished has its row, the rest gets none."""

from __future__ import annotations

import threading
import time

import pytest

from cbgen.errors import StoppedEarly
from cbgen.job.run_job import EarlyStop, run_job
from tests.helpers.jobs import make_stub_job, records_of, token_rows


def test_a_stop_gives_finished_rows_alone():
    stub = make_stub_job()
    stub.engine.holds = lambda request: int(request.request_id) >= 10
    given = stub.job.rows(records_of(token_rows(500)))
    first = [next(given)[0] for _ in range(10)]
    stub.job.stop_early()
    assert list(given) == []
    assert sorted(first) == list(range(10))
    assert not stub.job.is_complete
    assert stub.statistics.rows_answered == 10


def test_a_stop_ends_a_job_whose_input_waits():
    may_end = threading.Event()

    def rows():
        yield from token_rows(3)
        may_end.wait(30)

    stub = make_stub_job()
    given = stub.job.rows(records_of(rows()))
    assert len([next(given) for _ in range(3)]) == 3
    stub.job.stop_early()
    assert list(given) == []
    assert not stub.job.is_complete
    may_end.set()


def test_a_stop_before_the_first_row_gives_none():
    stub = make_stub_job()
    stub.job.stop_early()
    assert list(stub.job.rows(records_of(token_rows(50)))) == []
    assert not stub.job.is_complete


def test_a_stop_after_the_last_row_changes_nothing():
    stub = make_stub_job()
    rows = list(stub.job.rows(records_of(token_rows(50))))
    stub.job.stop_early()
    assert len(rows) == 50
    assert stub.job.is_complete


def test_rows_that_finish_within_the_grace_are_given():
    stub = make_stub_job()
    stub.engine.holds = lambda request: True
    stub.engine.wind_down = lambda deadline: stub.engine.finish(stub.engine.held)
    submitted = threading.Event()
    submit = stub.engine.submit

    def submit_and_tell(requests):
        submit(requests)
        submitted.set()

    stub.engine.submit = submit_and_tell
    given = stub.job.rows(records_of(token_rows(3)))
    collected: list[int] = []
    consumer = threading.Thread(target=lambda: collected.extend(index for index, _ in given))
    consumer.start()
    assert submitted.wait(30)
    stub.job.stop_early(grace=60)
    consumer.join(30)
    assert sorted(collected) == list(range(len(stub.engine.held)))


def test_the_engine_learns_the_deadline():
    stub = make_stub_job()
    before = time.monotonic()
    stub.job.stop_early(grace=100)
    stub.job.stop_early()
    late, now = stub.engine.deadlines
    assert before + 100 <= late <= time.monotonic() + 100
    assert before <= now <= time.monotonic()


@pytest.mark.parametrize("repetition", range(20))
def test_a_stop_at_any_moment_ends_the_job(repetition):
    stub = make_stub_job(max_in_flight=4)
    given = stub.job.rows(records_of(token_rows(2000)))
    stopper = threading.Thread(target=stub.job.stop_early)
    count = 0
    for _ in given:
        count += 1
        if count == 10 * repetition + 1:
            stopper.start()
    stopper.join()
    assert stub.job.is_complete == (count == 2000)


def test_a_wish_before_there_is_a_job_is_passed_on_later():
    stop = EarlyStop()
    stop.ask(grace=5)
    stop.ask(grace=2)
    heard: list[float] = []
    assert not stop.has_job
    stop.attach(heard.append)
    assert stop.has_job
    stop.ask()
    assert heard == [2, 0.0]


def test_a_run_that_stops_early_says_so_and_keeps_its_journal(checkpoint, tmp_path):
    from cbgen.io.inputs import Inputs
    from cbgen.job.options import JobOptions
    from cbgen.job.report.statistics import JobStatistics
    from cbgen.recipe.load import recipe_from_mapping

    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n' * 5)
    stop = EarlyStop()
    stop.ask()
    with pytest.raises(StoppedEarly):
        run_job(
            recipe_from_mapping({"model": {"path": str(checkpoint)}}),
            JobOptions(inputs=Inputs([str(source)]), output=str(output)),
            JobStatistics(),
            early_stop=stop,
        )
    assert not output.exists() or output.read_bytes() == b""
