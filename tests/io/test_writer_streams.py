"""Pipes, full disks and everything else that can happen to a file descriptor."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cbgen.errors import OutputError, UsageError
from cbgen.io.output import output_file, writer
from cbgen.io.output.output_file import ClosedOutput
from cbgen.io.output.writer import RowWriter

ROOT = Path(__file__).parents[2]


def line_of(index: int) -> bytes:
    return b'{"index":%d,"text":"something"}\n' % index


class Disk:
    """Stands in for os.write: takes some bytes, a few at a time, and then fails."""

    def __init__(self, monkeypatch, *, room: int | None = None, at_a_time: int = 10**9):
        self.room = room
        self.at_a_time = at_a_time
        self.write = os.write
        monkeypatch.setattr(output_file.os, "write", self)

    def __call__(self, descriptor, data):
        size = min(len(data), self.at_a_time)
        if self.room is not None:
            if self.room == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            size = min(size, self.room)
            self.room -= size
        return self.write(descriptor, data[:size])


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


@pytest.fixture
def pipe(monkeypatch):
    """Put a pipe in the place of stdout; yield the end to read from."""
    reading, writing = os.pipe()
    monkeypatch.setattr(output_file, "_STDOUT", writing)
    yield reading
    for descriptor in (reading, writing):
        with contextlib.suppress(OSError):  # a test may have closed it
            os.close(descriptor)


def test_partial_writes_are_continued(out, monkeypatch):
    Disk(monkeypatch, at_a_time=7)
    with RowWriter(str(out)) as rows:
        for index in (1, 0, 2):
            rows.write(index, line_of(index))
    assert out.read_bytes() == line_of(0) + line_of(1) + line_of(2)


@pytest.mark.parametrize("order", ["input", "completion"])
def test_a_full_disk_is_an_output_error_with_path_and_remedy(out, monkeypatch, order):
    rows = RowWriter(str(out), order=order)
    Disk(monkeypatch, room=10)
    with pytest.raises(OutputError, match=r"out\.jsonl: .*No space left.*make room"):
        rows.write(0, line_of(0))
    rows.abort()


def test_a_full_disk_leaves_no_half_line(out, monkeypatch):
    rows = RowWriter(str(out), order="completion")
    disk = Disk(monkeypatch, room=len(line_of(0)) + 10)
    rows.write(0, line_of(0))
    with pytest.raises(OutputError):
        rows.write(1, line_of(1))
    assert out.read_bytes() == line_of(0)
    disk.room = None
    rows.write(2, line_of(2))
    rows.close()
    assert out.read_bytes() == line_of(0) + line_of(2)


def test_a_full_disk_leaves_no_half_line_in_the_journal(out, monkeypatch):
    rows = RowWriter(str(out))
    Disk(monkeypatch, room=len(line_of(1)) + 10)
    rows.write(1, line_of(1))
    with pytest.raises(OutputError, match=r"out\.jsonl\.journal"):
        rows.write(2, line_of(2))
    rows.abort()
    assert Path(f"{out}.journal").read_bytes() == line_of(1)


def test_a_disk_that_is_full_while_waiting_rows_move_loses_none(out, monkeypatch):
    rows = RowWriter(str(out))
    for index in (1, 2, 3):
        rows.write(index, line_of(index))
    Disk(monkeypatch, room=2 * len(line_of(0)) + 5)
    with pytest.raises(OutputError):
        rows.write(0, line_of(0))
    rows.abort()
    assert out.read_bytes() == line_of(0)
    assert Path(f"{out}.journal").read_bytes() == line_of(1) + line_of(2) + line_of(3)


def test_a_disk_that_is_full_while_the_journal_shrinks_keeps_the_old_one(out, monkeypatch):
    monkeypatch.setattr(writer, "COMPACT_BYTES", 10)
    rows = RowWriter(str(out))
    for index in (1, 2, 3, 5):
        rows.write(index, line_of(index))
    Disk(monkeypatch, room=4 * len(line_of(0)))
    with pytest.raises(OutputError):
        rows.write(0, line_of(0))
    rows.abort()
    assert line_of(5) in Path(f"{out}.journal").read_bytes()
    assert not Path(f"{out}.journal.new").exists()


def test_an_interrupt_in_the_middle_of_a_line_leaves_no_half_line(out, monkeypatch):
    rows = RowWriter(str(out))
    rows.write(0, line_of(0))
    real_write = os.write

    def write_half(descriptor, data):
        real_write(descriptor, data[: len(data) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(output_file.os, "write", write_half)
        with pytest.raises(KeyboardInterrupt):
            rows.write(1, line_of(1))
    rows.write(1, line_of(1))
    rows.close()
    assert out.read_bytes() == line_of(0) + line_of(1)


def test_a_journal_that_was_cut_by_something_else_is_an_output_error(out):
    rows = RowWriter(str(out))
    rows.write(1, line_of(1))
    os.truncate(f"{out}.journal", 5)
    with pytest.raises(OutputError, match="changed by something else"):
        rows.write(0, line_of(0))
    rows.abort()


def test_files_are_synced_at_most_every_second(out, monkeypatch):
    now, synced = 100.0, []
    monkeypatch.setattr(writer.time, "monotonic", lambda: now)
    monkeypatch.setattr(output_file.os, "fsync", lambda descriptor: synced.append(now))
    rows = RowWriter(str(out))
    for index in range(30):
        now += 0.1
        rows.write(index, line_of(index))
    assert len(set(synced)) == 2
    now += 1
    rows.sync_if_due()
    assert synced[-1] == now
    count = len(synced)
    rows.sync_if_due()
    assert len(synced) == count
    rows.close()


def test_a_disk_that_fails_to_sync_is_an_output_error(out, monkeypatch):
    rows = RowWriter(str(out))
    rows.write(0, line_of(0))

    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(output_file.os, "fsync", fail)
    with pytest.raises(OutputError, match="Input/output error"):
        rows.close()
    rows.abort()
    assert out.read_bytes() == line_of(0)


def test_stdout_gets_the_rows_in_order_as_they_can_be_written(pipe):
    with RowWriter("-") as rows:
        rows.write(1, line_of(1))
        os.set_blocking(pipe, False)
        with pytest.raises(BlockingIOError):
            os.read(pipe, 100)
        rows.write(0, line_of(0))
        assert os.read(pipe, 10_000) == line_of(0) + line_of(1)


def test_stdout_in_order_of_completion_gets_rows_at_once(pipe):
    with RowWriter("-", order="completion") as rows:
        rows.write(1, line_of(1))
        assert os.read(pipe, 10_000) == line_of(1)


def test_abort_gives_stdout_the_rows_that_wait(pipe):
    rows = RowWriter("-")
    for index in (7, 3, 0):
        rows.write(index, line_of(index))
    rows.abort()
    assert os.read(pipe, 10_000) == line_of(0) + line_of(3) + line_of(7)


def test_a_closed_pipe_is_a_quiet_end(pipe):
    rows = RowWriter("-")
    os.close(pipe)
    with pytest.raises(ClosedOutput):
        rows.write(0, line_of(0))
    rows.abort()


def test_a_torn_stream_takes_no_further_rows(pipe, monkeypatch):
    rows = RowWriter("-", order="completion")
    disk = Disk(monkeypatch, room=5)
    with pytest.raises(OutputError):
        rows.write(0, line_of(0))
    disk.room = None
    with pytest.raises(OutputError, match="half a line"):
        rows.write(1, line_of(1))
    rows.abort()
    assert os.read(pipe, 100) == line_of(0)[:5]


def test_a_pipe_that_does_not_block_is_waited_for(pipe):
    os.set_blocking(output_file._STDOUT, False)
    received = bytearray()
    size = 3000 * len(line_of(1000))

    def read_all():
        while len(received) < size:
            received.extend(os.read(pipe, 10_000))

    reader = threading.Thread(target=read_all)
    rows = RowWriter("-")
    reader.start()
    for index in range(1000, 4000):
        rows.write(index - 1000, line_of(index))
    rows.close()
    reader.join()
    assert bytes(received) == b"".join(line_of(index) for index in range(1000, 4000))


def test_devices_need_no_overwrite_and_get_no_journal():
    with RowWriter("/dev/null") as rows:
        rows.write(1, line_of(1))
        rows.write(0, line_of(0))
    assert not Path("/dev/null.journal").exists()


def test_a_named_pipe_gets_the_rows_in_order(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    received = []
    reader = threading.Thread(target=lambda: received.append(path.read_bytes()))
    reader.start()
    with RowWriter(str(path)) as rows:
        rows.write(1, line_of(1))
        rows.write(0, line_of(0))
    reader.join()
    assert received == [line_of(0) + line_of(1)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="cannot be written"):
        RowWriter(str(tmp_path / "out.jsonl"))


def test_a_run_killed_at_any_moment_leaves_whole_rows(tmp_path):
    path = tmp_path / "out.jsonl"
    code = (
        "import os, signal\n"
        "from cbgen.io.output.writer import RowWriter\n"
        f"rows = RowWriter({str(path)!r})\n"
        "for index in (0, 1, 3, 5):\n"
        "    rows.write(index, b'{\"index\":%d}\\n' % index)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert path.read_bytes() == b'{"index":0}\n{"index":1}\n'
    assert Path(f"{path}.journal").read_bytes() == b'{"index":3}\n{"index":5}\n'


def test_a_device_without_room_is_an_output_error():
    rows = RowWriter("/dev/full")
    with pytest.raises(OutputError, match=r"/dev/full: .*No space left"):
        rows.write(0, line_of(0))
    rows.abort()
