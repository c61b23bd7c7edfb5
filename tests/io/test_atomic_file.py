from __future__ import annotations

import os

import pytest

from cbgen.errors import OutputError, UsageError
from cbgen.io.output.atomic_file import AtomicFile


def test_the_content_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "stats.json"
    file = AtomicFile(str(path), "--stats")
    file.replace(b"first")
    with path.open("rb") as reader:
        file.replace(b"second")
        assert reader.read() == b"first"
    assert path.read_bytes() == b"second"
    assert [entry.name for entry in tmp_path.iterdir()] == ["stats.json"]


def test_a_link_stays_a_link(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    AtomicFile(str(link), "--stats").replace(b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_others_may_read_it_as_far_as_the_umask_allows(tmp_path):
    path = tmp_path / "m.prom"
    before = os.umask(0o022)
    try:
        AtomicFile(str(path), "--metrics").replace(b"x")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("path", [".", "/dev/null", "missing/stats.json"])
def test_what_is_no_regular_file_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--stats"):
        AtomicFile(path, "--stats")


def test_a_failing_write_leaves_the_last_content(tmp_path, monkeypatch):
    path = tmp_path / "stats.json"
    file = AtomicFile(str(path), "--stats")
    file.replace(b"good")

    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OutputError, match="No space left"):
        file.replace(b"bad")
    assert path.read_bytes() == b"good"
    assert [entry.name for entry in tmp_path.iterdir()] == ["stats.json"]
