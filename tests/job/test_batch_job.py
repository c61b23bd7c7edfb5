from __future__ import annotations

import gc
import resource
import threading
import time
from pathlib import Path

import pytest

from cbgen.errors import EngineError, UsageError
from cbgen.io.ids import IdIndex
from cbgen.io.json_values import encode_row
from cbgen.io.output.writer import RowWriter
from cbgen.io.records import Record
from cbgen.job import batch_job
from tests.helpers.jobs import job_threads, make_stub_job, records_of, token_rows
from tests.helpers.records import read_records


def test_every_record_gets_one_row():
    stub = make_stub_job()
    rows = list(stub.job.rows(records_of(token_rows(500))))
    assert sorted(index for index, _ in rows) == list(range(500))
    assert all(row["error"] is None for _, row in rows)


def test_no_records_give_no_rows():
    assert list(make_stub_job().job.rows(iter(()))) == []


def test_bad_records_fail_alone():
    rows = token_rows(20)
    rows[3] = {"nothing": 1}
    rows[7] = {"prompt_token_ids": []}
    stub = make_stub_job()
    answered = dict(stub.job.rows(records_of(rows)))
    failed = {index: row["error"]["code"] for index, row in answered.items() if row["error"]}
    assert failed == {3: "no_prompt", 7: "invalid_prompt_token_ids"}
    assert (stub.statistics.rows_answered, stub.statistics.rows_failed) == (18, 2)
    assert dict(stub.statistics.errors) == {"no_prompt": 1, "invalid_prompt_token_ids": 1}


def test_a_strict_job_ends_at_the_first_row_that_fails():
    stub = make_stub_job()
    rows = [*token_rows(5), {"prompt_token_ids": []}]
    with pytest.raises(UsageError, match=r"row 5: prompt_token_ids must be .* \(--strict\)"):
        list(stub.job.rows(records_of(rows), strict=True))


@pytest.mark.parametrize("max_in_flight", [1, 2, 63])
def test_few_places_in_flight_are_enough(max_in_flight):
    stub = make_stub_job(max_in_flight=max_in_flight)
    assert len(list(stub.job.rows(records_of(token_rows(300))))) == 300


def test_rows_in_flight_are_bounded():
    stub = make_stub_job(max_in_flight=10)
    stub.engine.holds = lambda request: True
    read = []

    def rows():
        for index, row in enumerate(token_rows(1000)):
            read.append(index)
            yield row

    held_all = threading.Event()
    submit = stub.engine.submit

    def submit_and_tell(requests):
        submit(requests)
        if len(stub.engine.held) == 10:
            held_all.set()

    stub.engine.submit = submit_and_tell
    given = stub.job.rows(records_of(rows()))
    consumer = threading.Thread(target=lambda: next(given), daemon=True)
    consumer.start()
    assert held_all.wait(5)
    # Ten in flight, ten read ahead, and one in the reader's hand.
    assert len(read) <= 21
    stub.engine.finish(stub.engine.held)
    consumer.join(5)
    assert not consumer.is_alive()


def test_one_slow_row_stalls_nobody():
    stub = make_stub_job(max_in_flight=8)
    stub.engine.holds = lambda request: request.request_id == "0"
    given = stub.job.rows(records_of(token_rows(100)))
    first = [next(given)[0] for _ in range(99)]
    assert 0 not in first
    stub.engine.finish(stub.engine.held)
    assert [index for index, _ in given] == [0]


def test_the_first_row_leaves_before_the_input_is_read_to_its_end():
    may_end = threading.Event()

    def rows():
        yield from token_rows(3)
        assert may_end.wait(10)
        yield {"prompt_token_ids": [5]}

    given = make_stub_job().job.rows(records_of(rows()))
    assert {next(given)[0] for _ in range(3)} == {0, 1, 2}
    may_end.set()
    assert [index for index, _ in given] == [3]


def test_a_failing_input_ends_the_job_with_its_error():
    def rows():
        yield from token_rows(2)
        raise UsageError("in.jsonl: cannot be read: Input/output error")

    with pytest.raises(UsageError, match="Input/output error"):
        list(make_stub_job().job.rows(records_of(rows())))


def test_a_dead_engine_ends_the_job_with_its_cause():
    stub = make_stub_job()
    stub.engine.holds = lambda request: True
    stub.engine.submit = lambda requests: stub.engine.results.close(EngineError("out of memory"))
    with pytest.raises(EngineError, match="out of memory"):
        list(stub.job.rows(records_of(token_rows(5))))


def test_an_abandoned_job_leaves_no_thread():
    stub = make_stub_job(max_in_flight=4)
    before = threading.active_count()
    given = stub.job.rows(records_of(token_rows(1000)))
    next(given)
    threads = [t for t in threading.enumerate() if t.name in ("cbgen-reader", "cbgen-preparer")]
    given.close()
    for thread in threads:
        thread.join(5)
    assert threading.active_count() <= before
    assert job_threads() == []


def test_an_idle_job_says_so(monkeypatch):
    monkeypatch.setattr(batch_job, "_IDLE_SECONDS", 0.01)
    stub = make_stub_job()
    stub.engine.holds = lambda request: True
    called = []

    def on_idle():
        called.append(True)
        stub.engine.finish(stub.engine.held)

    rows = list(stub.job.rows(records_of(token_rows(1)), on_idle=on_idle))
    assert len(rows) == 1
    assert called


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_memory_does_not_grow_with_the_file(tmp_path):
    """200,000 rows: memory after row 20,000 and after row 200,000 differs by less than 20 MB."""
    count = 200_000
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"".join(b'{"prompt_token_ids": [%d]}\n' % (i % 90) for i in range(count)))
    stub = make_stub_job(keeps_ids=False)
    ids = IdIndex()
    held = {}
    with source.open("rb") as stream, RowWriter(str(tmp_path / "out.jsonl")) as writer:
        records = (ids.admit(record) for record in read_records(stream, "in.jsonl"))
        for number, (index, row) in enumerate(stub.job.rows(records), 1):
            writer.write(index, encode_row(row))
            if number == 1:
                assert not stub.statistics.input_ended
            if number in (count // 10, count):
                gc.collect()
                held[number] = resident_bytes()
    assert held[count] - held[count // 10] < 20 * 2**20
    with (tmp_path / "out.jsonl").open("rb") as lines:
        assert sum(1 for _ in lines) == count


def test_rows_that_failed_are_let_go_at_once():
    """Without the collector of cycles: an error must not keep its row through its traceback."""
    stub = make_stub_job(max_in_flight=16, keeps_ids=False)
    bad = [{"prompt_token_ids": [-1]}, {"x": 1}, {"prompt": "no tokenizer"}, {"prompt": 5}]
    num_alive = 0
    gc.collect()
    gc.disable()
    try:
        for number, _ in enumerate(stub.job.rows(records_of(bad * 200)), 1):
            if number == 600:
                num_alive = sum(isinstance(thing, Record) for thing in gc.get_objects())
    finally:
        gc.enable()
    assert 0 < num_alive < 64


def test_the_bytes_of_rows_in_flight_are_bounded(monkeypatch):
    monkeypatch.setattr(batch_job, "_MAX_BYTES", 1000)
    stub = make_stub_job()
    stub.engine.holds = lambda request: True
    num_read = 0

    def rows():
        nonlocal num_read
        for row in token_rows(1000):
            num_read += 1
            yield {**row, "note": "x" * 300}

    def stop():
        time.sleep(0.2)
        stub.job.stop_early()

    threading.Thread(target=stop).start()
    list(stub.job.rows(records_of(rows())))
    assert 2 <= num_read <= 5


def test_rows_longer_than_the_bound_follow_each_other(monkeypatch):
    monkeypatch.setattr(batch_job, "_MAX_BYTES", 10)
    assert len(list(make_stub_job().job.rows(records_of(token_rows(50))))) == 50
