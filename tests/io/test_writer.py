from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbgen.errors import OutputError, UsageError
from cbgen.io.output import journal as journal_module
from cbgen.io.output import writer
from cbgen.io.output.writer import RowWriter


def line_of(index: int, size: int = 0) -> bytes:
    return b'{"index":%d,"text":"%s"}\n' % (index, b"x" * size)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


@pytest.fixture
def journal(tmp_path):
    return tmp_path / "out.jsonl.journal"


@given(order=st.permutations(range(12)), sizes=st.lists(st.integers(0, 9000), min_size=12))
@settings(max_examples=60)
def test_rows_reach_the_file_in_input_order_whatever_finishes_first(tmp_path_factory, order, sizes):
    path = tmp_path_factory.mktemp("out") / "out.jsonl"
    with RowWriter(str(path)) as rows:
        for index in order:
            rows.write(index, line_of(index, sizes[index]))
    assert path.read_bytes() == b"".join(line_of(index, sizes[index]) for index in range(12))
    assert [file.name for file in path.parent.iterdir()] == ["out.jsonl"]


@given(order=st.permutations(range(8)))
@settings(max_examples=30)
def test_every_row_is_in_the_file_or_its_journal_when_write_returns(tmp_path_factory, order):
    path = tmp_path_factory.mktemp("out") / "out.jsonl"
    rows = RowWriter(str(path))
    written = set()
    for index in order:
        rows.write(index, line_of(index))
        written.add(line_of(index))
        journal_lines = (path.parent / "out.jsonl.journal").read_bytes().splitlines(keepends=True)
        assert {*path.read_bytes().splitlines(keepends=True), *journal_lines} == written
    rows.close()


def test_order_completion_appends_as_rows_come_without_a_journal(out, journal):
    with RowWriter(str(out), order="completion") as rows:
        for number, index in enumerate([2, 0, 1]):
            rows.write(index, line_of(index))
            assert out.read_bytes().count(b"\n") == number + 1
            assert not journal.exists()
    assert out.read_bytes() == line_of(2) + line_of(0) + line_of(1)


def test_rows_can_be_read_while_the_run_goes_on(out):
    rows = RowWriter(str(out))
    with out.open("rb") as reader:
        for index in range(3):
            rows.write(index, line_of(index))
            assert reader.readline() == line_of(index)
    rows.close()


def test_a_run_without_rows_leaves_an_empty_file(out, journal):
    RowWriter(str(out)).close()
    assert out.read_bytes() == b""
    assert not journal.exists()


def test_closing_twice_is_closing_once(out):
    rows = RowWriter(str(out))
    rows.write(0, line_of(0))
    rows.close()
    rows.close()
    rows.abort()
    assert out.read_bytes() == line_of(0)


def test_abort_leaves_every_finished_row_on_disk(out, journal):
    rows = RowWriter(str(out))
    for index in (0, 3, 1, 5):
        rows.write(index, line_of(index))
    rows.abort()
    assert out.read_bytes() == line_of(0) + line_of(1)
    assert line_of(3) in journal.read_bytes()
    assert line_of(5) in journal.read_bytes()


def test_an_exception_aborts(out, journal):
    def interrupted_run():
        with RowWriter(str(out)) as rows:
            rows.write(1, line_of(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_run()
    assert journal.read_bytes() == line_of(1)


def test_an_abort_before_the_first_row_leaves_no_files(out, journal):
    RowWriter(str(out)).abort()
    assert not out.exists()
    assert not journal.exists()


def test_a_row_that_never_came_is_an_error_that_loses_nothing(out, journal):
    rows = RowWriter(str(out))
    rows.write(0, line_of(0))
    rows.write(2, line_of(2))
    with pytest.raises(OutputError, match="row 1 never came"):
        rows.close()
    rows.abort()
    assert out.read_bytes() == line_of(0)
    assert journal.read_bytes() == line_of(2)


def test_a_row_that_comes_twice_is_a_fault_of_the_caller(out):
    with RowWriter(str(out)) as rows:
        rows.write(0, line_of(0))
        rows.write(2, line_of(2))
        for index in (0, 2):
            with pytest.raises(AssertionError, match="came twice"):
                rows.write(index, line_of(index))
        rows.write(1, line_of(1))


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.journal"])
def test_an_existing_output_or_journal_is_refused_and_kept(tmp_path, out, name):
    (tmp_path / name).write_bytes(b"old\n")
    with pytest.raises(UsageError, match=rf"{name}: already exists; use --resume .* --overwrite"):
        RowWriter(str(out))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(name, b"old\n")]


def test_overwrite_replaces_output_and_journal(out, journal):
    out.write_bytes(b"old\n" * 100)
    journal.write_bytes(b"old\n" * 100)
    rows = RowWriter(str(out), overwrite=True)
    rows.write(1, line_of(1))
    assert out.read_bytes() == b""
    assert journal.read_bytes() == line_of(1)
    rows.write(0, line_of(0))
    rows.close()
    assert out.read_bytes() == line_of(0) + line_of(1)


def test_overwrite_keeps_the_old_output_until_there_is_a_row(out):
    out.write_bytes(b"old\n")
    RowWriter(str(out), overwrite=True).abort()
    assert out.read_bytes() == b"old\n"


def test_overwrite_with_no_rows_at_all_leaves_an_empty_file(out):
    out.write_bytes(b"old\n")
    RowWriter(str(out), overwrite=True).close()
    assert out.read_bytes() == b""


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"folder .*/missing does not exist; create it"):
        RowWriter(str(tmp_path / "missing" / "out.jsonl"))


def test_a_folder_is_refused_as_output(tmp_path):
    with pytest.raises(UsageError, match="is a folder"):
        RowWriter(str(tmp_path), overwrite=True)


def test_an_output_in_the_working_folder_needs_no_folder_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RowWriter("out.jsonl") as rows:
        rows.write(0, line_of(0))
    assert (tmp_path / "out.jsonl").read_bytes() == line_of(0)


def test_the_journal_is_no_larger_than_what_waits_allows(out, journal, monkeypatch):
    monkeypatch.setattr(writer, "COMPACT_BYTES", 2000)
    rows = RowWriter(str(out))
    largest = 0
    for index in range(0, 2000, 2):  # each second row comes before the one that it follows
        rows.write(index + 1, line_of(index + 1, 50))
        rows.write(index, line_of(index, 50))
        largest = max(largest, journal.stat().st_size)
    assert largest < 2500
    rows.close()
    assert out.read_bytes() == b"".join(line_of(index, 50) for index in range(2000))


def test_the_journal_is_rewritten_while_rows_wait(out, journal, monkeypatch):
    monkeypatch.setattr(writer, "COMPACT_BYTES", 2000)
    count, window = 2000, 30
    shuffled = random.Random(0)
    finish_times = [index + shuffled.uniform(0, window) for index in range(count)]
    rows = RowWriter(str(out))
    total = 0
    for index in sorted(range(count), key=finish_times.__getitem__):
        rows.write(index, line_of(index, index % 90))
        total += len(line_of(index, index % 90))
        waiting = total - out.stat().st_size
        assert journal.stat().st_size <= waiting + max(2000, waiting)
    rows.close()
    assert out.read_bytes() == b"".join(line_of(index, index % 90) for index in range(count))


def test_rows_that_wait_take_an_offset_each(out):
    count = 20_000
    rows = RowWriter(str(out))
    rows.write(1, line_of(1, 500))
    tracemalloc.start()
    for index in range(2, count):
        rows.write(index, line_of(index, 500))
    current = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert current < 10 * count
    rows.write(0, line_of(0, 500))
    rows.close()
    assert out.read_bytes().count(b"\n") == count


def test_one_write_moves_a_bounded_part_of_what_waits(out, monkeypatch):
    monkeypatch.setattr(writer, "DRAIN_BYTES", 1000)
    rows = RowWriter(str(out))
    for index in range(1, 100):
        rows.write(index, line_of(index, 80))
    rows.write(0, line_of(0, 80))
    assert 0 < out.stat().st_size < 2500
    rows.write(100, line_of(100, 80))
    rows.close()
    assert out.read_bytes() == b"".join(line_of(index, 80) for index in range(101))


@pytest.mark.parametrize("memory_bytes", [100, 10_000])
def test_waiting_rows_of_a_stream_are_kept_in_memory_or_in_a_temporary_file(memory_bytes):
    spool = journal_module.Spool(memory_bytes)
    rows = journal_module.WaitingRows(spool)
    for index in range(50, -1, -1):
        rows.put(index, line_of(index))
    lines = [line_of(index) for index in range(51)]
    assert [line for _, line in rows.rows()] == lines
    taken = rows.take(300)
    rows.keep(rows.rows())
    assert spool.size == sum(len(line) for _, line in rows.rows())
    assert rows.take(1) == [line_of(len(taken))]
    assert [*taken, line_of(len(taken)), *rows.take(10**6)] == lines
    spool.discard()
