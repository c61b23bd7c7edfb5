"""Disks that are full, and folders that cannot be written."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from functools import partial
from unittest import mock

import pytest

from cbgen.errors import OutputError
from tests.helpers.commands import Command
from tests.helpers.dying_disk import FullDisk, small_sizes
from tests.helpers.small_runs import SUFFIXES, assert_same_output, run_small, write_input

STEP = 97
"""Bytes between one full disk and the next."""


@pytest.fixture
def rows(tmp_path):
    return write_input(tmp_path, 12)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_disk_that_is_full_at_any_byte_loses_no_row(rows, tmp_path, suffix):
    reference = tmp_path / f"reference{suffix}"
    run_small(rows, reference)
    for number, room in enumerate(range(0, 20_000, STEP)):
        out = tmp_path / str(number) / f"out{suffix}"
        out.parent.mkdir()
        written: list[int] = []
        with small_sizes(), mock.patch.object(os, "write", FullDisk(room)):
            try:
                run_small(rows, out, written=written)
            except OutputError as error:
                message = str(error)
            else:
                break
        assert "No space left on device" in message
        assert "--resume" in message
        assert run_small(rows, out, resume=True).rows_resumed >= len(written)
        assert_same_output(out, reference)
    assert number > 20


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_disk_that_is_full_during_a_retry_loses_no_row(rows, tmp_path, suffix):
    reference = tmp_path / f"reference{suffix}"
    run_small(rows, reference)
    for number, room in enumerate(range(0, 20_000, STEP)):
        out = tmp_path / str(number) / f"out{suffix}"
        out.parent.mkdir()
        run_small(rows, out)
        with small_sizes(), mock.patch.object(os, "write", FullDisk(room)):
            try:
                run_small(rows, out, resume=True, retry=frozenset({"error"}))
            except OutputError:
                ended = False
            else:
                ended = True
        assert run_small(rows, out, resume=True).rows_resumed >= 10
        assert_same_output(out, reference)
        if ended:
            break
    assert number > 5


def fill_disk(room: int) -> None:
    """Leave no more room than this on the disk of the process."""
    os.write = FullDisk(room)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_command_ends_with_3_and_says_how_to_go_on(
    slow_recipe, source, undisturbed, tmp_path, suffix
):
    out = tmp_path / f"out{suffix}"
    arguments = ("run", slow_recipe, "-i", str(source), "-o", str(out))
    command = Command(*arguments, prepare=partial(fill_disk, 3000))
    assert command.wait() == 3
    assert "No space left on device" in command.err.text
    assert "make room, then run again with --resume" in command.err.text
    assert "Traceback" not in command.err.text
    command = Command(*arguments, "--resume")
    assert command.wait() == 0, command.err.text
    assert "by an earlier run" in command.err.text
    assert_same_output(out, undisturbed(suffix))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    with contextlib.suppress(FileNotFoundError):
        if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
            yield folder
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
            return
    pytest.skip("no file system can be mounted here")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_small_file_system_that_fills_up_keeps_the_rows_that_fit(small_disk, tmp_path, suffix):
    rows = write_input(tmp_path, 300)
    reference = tmp_path / f"reference{suffix}"
    run_small(rows, reference)
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * 40_000)
    out = small_disk / f"out{suffix}"
    written: list[int] = []
    with pytest.raises(OutputError, match=r"No space left .*--resume"):
        run_small(rows, out, written=written)
    assert written
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    assert run_small(rows, out, resume=True).rows_resumed >= len(written)
    assert_same_output(out, reference)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("operation", ["ftruncate", "fsync", "replace"])
def test_a_file_system_that_becomes_read_only_keeps_the_rows(rows, tmp_path, suffix, operation):
    reference, out = tmp_path / f"reference{suffix}", tmp_path / f"out{suffix}"
    run_small(rows, reference)
    run_small(rows, out)
    error = OSError(errno.EROFS, "Read-only file system")
    with (
        small_sizes(),
        mock.patch.object(os, operation, side_effect=error),
        pytest.raises(OutputError),
    ):
        run_small(rows, out, resume=True, retry=frozenset({"error"}))
    assert run_small(rows, out, resume=True).rows_resumed >= 10
    assert_same_output(out, reference)
