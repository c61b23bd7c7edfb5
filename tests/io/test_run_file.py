from __future__ import annotations

from pathlib import Path

import pytest

from cbgen.errors import UsageError
from cbgen.io.output.run_file import RunFile, RunHeader

HEADER = RunHeader(recipe_digest="abc", recipe={"model": {"path": "m"}}, inputs=["in.jsonl"])


def digest_of(number: int) -> bytes:
    return number.to_bytes(8, "big")


@pytest.fixture
def output(tmp_path):
    return str(tmp_path / "out.jsonl")


@pytest.fixture
def written(output):
    """Write OUT.run with 10,000 records."""
    run = RunFile.open(output, HEADER)
    run.begin()
    for number in range(1, 10_001):
        run.note(digest_of(number))
    run.flush()
    run.close()
    return Path(output + ".run")


def test_a_run_file_is_read_back(output, written):
    run = RunFile.open(output, HEADER)
    assert run.previous == HEADER
    assert list(run.known()) == [digest_of(number) for number in range(1, 10_001)]
    assert not run.has_ended
    run.close()


def test_a_record_takes_eight_bytes(written):
    header, _, digests = written.read_bytes().partition(b"\n")
    assert header.startswith(b"{")
    assert len(digests) == 8 * 10_000


def test_records_are_added_behind_those_that_are_known(output, written):
    run = RunFile.open(output, HEADER)
    run.begin()
    run.note(digest_of(10_001))
    run.note_end()
    run.sync()
    run.close()
    again = RunFile.open(output, HEADER)
    assert (again.num_known, again.has_ended) == (10_001, True)
    again.begin()
    again.note(digest_of(10_002))
    again.flush()
    again.close()
    last = RunFile.open(output, HEADER)
    assert (last.num_known, last.has_ended) == (10_002, False)
    last.close()


@pytest.mark.parametrize("tail", [b"abc", bytes(800), bytes(3)])
def test_what_a_crash_left_at_the_end_is_not_known(output, written, tail):
    with written.open("ab") as file:
        file.write(tail)
    run = RunFile.open(output, HEADER)
    assert run.num_known == 10_000
    run.begin()
    run.note(digest_of(10_001))
    run.flush()
    run.close()
    assert written.read_bytes().partition(b"\n")[2][-8:] == digest_of(10_001)
    assert len(written.read_bytes().partition(b"\n")[2]) == 8 * 10_001


@pytest.mark.parametrize(
    "content", [b"", b'{"format":1,"recipe_dig', b"no JSON\n", b"[]\n", b"{}\n"]
)
def test_a_torn_header_is_none(output, content):
    Path(output + ".run").write_bytes(content)
    run = RunFile.open(output, HEADER)
    assert run.previous is None
    assert run.num_known == 0
    run.close()


def test_nothing_changes_before_the_run_begins(output, written):
    before = written.read_bytes()
    run = RunFile.open(output, HEADER)
    run.note(digest_of(1))
    run.draft([digest_of(2)])
    run.flush()
    run.remove_if_created()
    assert written.read_bytes() == before
    assert list(written.parent.iterdir()) == [written]


def test_a_draft_takes_the_place_of_the_file_and_keeps_the_lock(output, written):
    other = RunHeader(recipe_digest="other")
    run = RunFile.open(output, other)
    run.draft(digest_of(number) for number in (5, 6))
    assert list(run.known()) == [digest_of(5), digest_of(6)]
    run.begin()
    with pytest.raises(UsageError, match="another run is writing it"):
        RunFile.open(output, HEADER)
    run.note(digest_of(7))
    run.flush()
    run.close()
    again = RunFile.open(output, HEADER)
    assert again.previous == other
    assert list(again.known()) == [digest_of(number) for number in (5, 6, 7)]
    again.close()


@pytest.mark.parametrize("digest", [bytes(8), b"\xff" * 8])
def test_digests_that_mean_something_else_are_stored_as_another(output, digest):
    run = RunFile.open(output, HEADER)
    run.begin()
    run.note(digest)
    run.note(digest_of(1))
    run.flush()
    run.close()
    again = RunFile.open(output, HEADER)
    assert again.num_known == 2
    again.close()
