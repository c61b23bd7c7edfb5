"""A file is known by what it is: no command writes over what it reads, or twice into one file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cbgen.errors import OutputError, UsageError
from cbgen.io.output.output_file import note_output
from cbgen.io.output.writer import RowWriter
from cbgen.io.used_files import UsedFiles, real_output

ROOT = Path(__file__).parents[2]


def refuse_same(source: str, output: str) -> None:
    files = UsedFiles()
    files.note_read(source, f"the input file {source}")
    note_output(files, output)


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
@pytest.mark.parametrize("name", ["out.jsonl", "result.jsonl.journal", "result.jsonl.run"])
def test_an_output_that_is_the_input_is_refused_through_links(tmp_path, link, name):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"{}\n")
    getattr(tmp_path / name, link)(source)
    output = tmp_path / name.removesuffix(".journal").removesuffix(".run")
    with pytest.raises(UsageError, match=r"is already the input file .*in\.jsonl; name another"):
        refuse_same(str(source), str(output))


def test_an_output_that_is_another_file_is_not_refused(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"{}\n")
    refuse_same(str(source), str(tmp_path / "out.jsonl"))
    refuse_same(str(tmp_path / "missing.jsonl"), str(tmp_path / "out.jsonl"))
    refuse_same("-", "-")


def test_a_missing_file_is_known_by_its_folder_and_name(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to(tmp_path / "there")
    monkeypatch.chdir(tmp_path)
    files = UsedFiles()
    files.note_written("there/a.json", "the file of --stats", given_as="--stats there/a.json")
    with pytest.raises(UsageError, match="already the file of --stats"):
        files.note_written("here/a.json", "the file of --trace", given_as="--trace here/a.json")


def test_devices_may_be_used_more_than_once():
    refuse_same("/dev/null", "/dev/null")


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
def test_a_name_that_no_file_can_have_is_left_to_whoever_opens_it(name):
    UsedFiles().note_read(name, "a file of the model")


def test_stdin_and_output_may_not_be_one_file(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"{}\n")
    code = f"from tests.io.test_used_files import refuse_same; refuse_same('-', {str(path)!r})"
    with path.open("rb") as stdin:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdin=stdin, capture_output=True, check=False
        )
    assert b"UsageError" in done.stderr


def test_an_output_behind_symbolic_links_is_the_file_they_lead_to(tmp_path):
    (tmp_path / "target.jsonl").write_bytes(b"")
    (tmp_path / "link").symlink_to("target.jsonl")
    (tmp_path / "dangling").symlink_to("none.jsonl")
    (tmp_path / "device").symlink_to("/dev/null")
    assert real_output(str(tmp_path / "link")) == str(tmp_path / "target.jsonl")
    assert real_output(str(tmp_path / "dangling")) == str(tmp_path / "none.jsonl")
    for name in (str(tmp_path / "device"), "-", "/dev/stdout", "plain.jsonl"):
        assert real_output(name) == name


def line_of(index: int) -> bytes:
    return b'{"index":%d}\n' % index


def test_a_second_writer_of_a_hard_link_is_refused(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    with RowWriter(str(first)) as rows:
        second.hardlink_to(first)
        with pytest.raises(UsageError, match=r"b\.jsonl: another run is writing it"):
            RowWriter(str(second), overwrite=True)
        rows.write(0, line_of(0))
    assert first.read_bytes() == line_of(0)
    assert not Path(f"{second}.journal").exists()


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize("change", ["unlink", "replace", "truncate", "append"])
@pytest.mark.parametrize("order", ["input", "completion"])
def test_an_output_that_something_else_changes_fails_and_says_so(tmp_path, suffix, change, order):
    path = tmp_path / f"out{suffix}"
    rows = RowWriter(str(path), order=order)
    for index in range(100):
        rows.write(index, line_of(index))
    rows._sync()
    if change == "unlink":
        path.unlink()
    elif change == "replace":
        (tmp_path / "other").write_bytes(line_of(0))
        (tmp_path / "other").replace(path)
    elif change == "truncate":
        with path.open("r+b") as file:
            file.truncate(5)
    else:
        with path.open("ab") as file:
            file.write(b"mine\n")
    rows.write(100, line_of(100))
    with pytest.raises(OutputError, match="something else"):
        rows.close()
    rows.abort()
    if path.exists():
        assert b"\0" not in path.read_bytes() or suffix == ".jsonl.gz"


def test_a_name_whose_links_may_not_be_read_is_left_to_whoever_opens_it(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.path.realpath", refuse)
    UsedFiles().note_read(str(tmp_path / "missing"), "a file of the model")
