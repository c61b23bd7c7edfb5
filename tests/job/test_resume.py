"""When a run may go on with an output, what it keeps, and what it says where it may not."""

from __future__ import annotations

import json
import logging
import os
import threading

import pytest

from cbgen.errors import UsageError
from cbgen.io.inputs import Shard
from cbgen.io.output.run_file import RunFile, RunHeader
from cbgen.job.resume import parse_retry
from tests.helpers.dying_disk import DyingDisk, small_sizes
from tests.helpers.small_runs import (
    SUFFIXES,
    assert_same_output,
    files_beside,
    make_recipe,
    read_output,
    run_small,
    unpacked,
    write_input,
)

ROWS = 20


@pytest.fixture
def source(tmp_path):
    return write_input(tmp_path, ROWS)


@pytest.fixture(params=[".jsonl"])
def out(tmp_path, request):
    return tmp_path / f"out{request.param}"


@pytest.fixture
def reference(source, out):
    path = out.parent / "undisturbed" / out.name
    path.parent.mkdir()
    run_small(source, path)
    return path


every_suffix = pytest.mark.parametrize("out", SUFFIXES, indirect=True)


def run_partly(source, out, operations=40, **options):
    """Let a run die somewhere in its middle."""
    with small_sizes(), DyingDisk(operations) as disk:
        run_small(source, out, **options)
    assert disk.has_died


def contents(out):
    return {path.name: path.read_bytes() for path in out.parent.glob("out*")}


def refuses(source, out, match, recipe=None, **options):
    """Check that a run is refused and changes no file."""
    before = contents(out)
    with pytest.raises(UsageError, match=match):
        run_small(source, out, recipe, **{"resume": True, **options})
    assert contents(out) == before


@every_suffix
def test_resume_without_an_output_is_an_ordinary_run(source, out, reference):
    assert run_small(source, out, resume=True).rows_resumed == 0
    assert_same_output(out, reference)


@every_suffix
def test_a_resume_with_nothing_left_changes_nothing_and_counts_the_same(source, out):
    first = run_small(source, out)
    before = contents(out)
    again = run_small(source, out, resume=True)
    assert contents(out) == before
    assert again.rows_resumed == ROWS
    assert again.rows_written == 0
    assert again.rows_read == ROWS
    total, expected = again.total(), first.total()
    assert total == expected
    assert total.rows_failed == 4


@every_suffix
def test_only_rows_that_are_missing_are_answered(source, out, reference):
    run_partly(source, out)
    written = []
    statistics = run_small(source, out, resume=True, written=written)
    assert 0 < len(written) < ROWS
    assert statistics.rows_resumed == ROWS - len(written)
    assert_same_output(out, reference)


@every_suffix
@pytest.mark.parametrize("order", ["input", "completion"])
def test_retry_redoes_rows_that_ended_so_and_no_others(source, out, reference, order):
    recipe = make_recipe(order)
    run_small(source, out, recipe)
    written = []
    kinds = parse_retry("error, length")
    run_small(source, out, recipe, resume=True, retry=kinds, written=written)
    assert sorted(written) == [index for index in range(ROWS) if index % 4 == 1 or index % 5 == 4]
    assert_same_output(out, reference, order)


def test_retry_takes_known_kinds_alone():
    assert parse_retry("error") == {"error"}
    with pytest.raises(UsageError, match=r"'errors' is no finish reason .* error"):
        parse_retry("length,errors")


@pytest.mark.parametrize("tail", [b'{"id":"r9","index":9,"text":"half', b"\0" * 100])
@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.journal"])
def test_a_torn_last_line_is_cut_off(source, out, reference, name, tail):
    run_partly(source, out)
    with (out.parent / name).open("ab") as file:
        file.write(tail)
    run_small(source, out, resume=True)
    assert_same_output(out, reference)


@pytest.mark.parametrize("out", [".jsonl.gz", ".jsonl.zst"], indirect=True)
def test_a_torn_frame_is_cut_off(source, out, reference):
    run_partly(source, out, operations=70)
    whole = out.read_bytes()
    for torn in (whole[:-3], whole + whole[:20], whole + b"garbage"):
        out.write_bytes(torn)
        run_partly(source, out, operations=1, resume=True)
    run_small(source, out, resume=True)
    assert_same_output(out, reference)


@pytest.mark.parametrize("out", [".jsonl.gz", ".jsonl.zst"], indirect=True)
def test_a_packed_output_can_be_read_while_it_grows(source, out):
    run_partly(source, out, operations=70)
    lines = unpacked(out).splitlines()
    assert [json.loads(line)["index"] for line in lines] == list(range(len(lines)))
    assert lines


def test_rows_that_someone_took_out_are_answered_again(source, out, reference):
    run_small(source, out)
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[3:8] + lines[10:]))
    assert run_small(source, out, resume=True).rows_resumed == ROWS - 5
    assert_same_output(out, reference)


@every_suffix
def test_a_changed_recipe_is_refused_with_what_changed(source, out):
    run_small(source, out)
    match = r"another recipe: generation_config.max_new_tokens was 4 and is 64\..*--resume-any"
    refuses(source, out, match, make_recipe(max_new_tokens=64))
    refuses(source, out, match, make_recipe(max_new_tokens=64), retry=frozenset({"length"}))


@every_suffix
def test_resume_any_redoes_rows_that_were_cut_off_under_a_longer_limit(source, out):
    run_small(source, out)
    before = {row["index"]: row for row in read_output(out)}
    longer, written = make_recipe(max_new_tokens=64), []
    retry = frozenset({"length"})
    run_small(source, out, longer, resume=True, resume_any=True, retry=retry, written=written)
    assert sorted(written) == [index for index in range(ROWS) if index % 20 in (1, 5, 13, 17)]
    for row in read_output(out):
        expected = before[row["index"]]
        assert row == expected or row["text"].startswith("64 words")
    assert run_small(source, out, longer, resume=True).rows_resumed == ROWS


def test_a_changed_row_is_refused_with_its_place_before_anything_is_written(source, out):
    run_partly(source, out)
    write_input(source.parent, ROWS, {3: "changed"})
    refuses(source, out, r"in\.jsonl:4: the input has changed")


def test_white_space_and_line_ends_change_no_row(source, out, reference):
    run_partly(source, out)
    source.write_bytes(b"\n\n" + source.read_bytes().replace(b"\n", b"  \r\n"))
    run_small(source, out, resume=True)
    assert_same_output(out, reference)


@every_suffix
def test_resume_any_redoes_rows_that_have_changed(source, out):
    run_small(source, out)
    write_input(source.parent, ROWS, {3: "changed"})
    written = []
    run_small(source, out, resume=True, resume_any=True, written=written)
    assert written == [3]
    rows = read_output(out)
    assert [row["index"] for row in rows] == list(range(ROWS))
    assert rows[3]["prompt"] == "changed"
    assert run_small(source, out, resume=True).rows_resumed == ROWS


def test_a_shorter_input_is_refused_and_resume_any_drops_its_rows(source, out):
    run_small(source, out)
    write_input(source.parent, 15)
    refuses(source, out, "the run before read 20 rows, and .*in.jsonl ends after 15")
    run_small(source, out, resume=True, resume_any=True)
    assert [row["index"] for row in read_output(out)] == list(range(15))


@every_suffix
def test_a_longer_input_is_answered_to_its_end_and_said_to_have_grown(source, out, caplog):
    run_small(source, out)
    write_input(source.parent, ROWS + 3)
    with caplog.at_level(logging.WARNING):
        statistics = run_small(source, out, resume=True)
    assert "in.jsonl:21: the input has grown: the run before read 20 rows" in caplog.text
    assert statistics.rows_resumed == ROWS
    assert [row["index"] for row in read_output(out)] == list(range(ROWS + 3))


def test_a_larger_limit_just_continues(source, out, reference, caplog):
    run_small(source, out, limit=7)
    assert run_small(source, out, limit=12, resume=True).rows_resumed == 7
    assert run_small(source, out, resume=True).rows_resumed == 12
    assert "grown" not in caplog.text
    assert_same_output(out, reference)


def test_a_smaller_limit_is_refused(source, out):
    run_small(source, out)
    refuses(source, out, "read 20 rows, and --limit 7 takes 7", limit=7)


def test_a_shard_goes_on_as_itself_and_as_no_other(source, out):
    run_partly(source, out, operations=30, shard=Shard(1, 2))
    refuses(source, out, "holds shard 1/2, and this run is shard 0/2", shard=Shard(0, 2))
    run_small(source, out, resume=True, shard=Shard(1, 2))
    assert [row["index"] for row in read_output(out)] == list(range(1, ROWS, 2))


def test_another_order_is_another_recipe_and_resume_any_sorts_the_rows(source, out, reference):
    run_small(source, out, make_recipe("completion"))
    refuses(source, out, "output.order was completion and is not given")
    assert run_small(source, out, resume=True, resume_any=True).rows_resumed == ROWS
    assert_same_output(out, reference)


def test_a_missing_run_file_is_refused_and_resume_any_trusts_the_rows(source, out, reference):
    run_partly(source, out)
    (out.parent / "out.jsonl.run").unlink()
    refuses(source, out, r"out\.jsonl\.run: is missing .*--resume-any")
    statistics = run_small(source, out, resume=True, resume_any=True)
    assert statistics.rows_resumed > 0
    assert_same_output(out, reference)
    assert run_small(source, out, resume=True).rows_resumed == ROWS


def test_a_run_file_of_another_format_is_refused(source, out):
    run_small(source, out)
    path = out.parent / "out.jsonl.run"
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":2'))
    refuses(source, out, "has format 2")


def test_resume_and_overwrite_contradict_each_other(source, out):
    refuses(source, out, "give one", overwrite=True)


@pytest.mark.parametrize("output", ["-", "/dev/null"])
def test_resume_needs_an_output_file(source, output):
    with pytest.raises(UsageError, match="--resume needs an output file"):
        run_small(source, output, resume=True)


def test_one_output_has_one_run_at_a_time(source, out):
    run_small(source, out)
    other = RunFile.open(str(out), RunHeader(recipe_digest=""))
    for options in ({"resume": True}, {"resume": False, "overwrite": True}):
        refuses(source, out, "another run is writing it", **options)
    other.close()
    assert run_small(source, out, resume=True).rows_resumed == ROWS


class Pipe:
    """A named pipe that holds the rows of a file, once for each time it is read."""

    def __init__(self, path, source):
        self.path = path
        os.mkfifo(path)
        self._data = source.read_bytes()

    def __enter__(self):
        self._thread = threading.Thread(target=self.path.write_bytes, args=(self._data,))
        self._thread.start()
        return str(self.path)

    def __exit__(self, *error):
        self._thread.join()


def test_a_pipe_resumes_with_the_same_rows(source, out, reference, tmp_path):
    pipe = Pipe(tmp_path / "pipe", source)
    with pipe as path:
        run_partly(path, out)
    with pipe as path:
        assert 0 < run_small(path, out, resume=True).rows_resumed < ROWS
    assert_same_output(out, reference)


def test_a_pipe_with_another_row_is_refused_where_it_comes(source, out, tmp_path):
    run_small(source, out)
    write_input(source.parent, ROWS, {3: "changed"})
    with Pipe(tmp_path / "pipe", source) as path:
        refuses(path, out, "pipe:4: the input has changed")


def test_a_pipe_that_ends_early_is_refused(source, out, tmp_path):
    run_small(source, out)
    write_input(source.parent, 12)
    with Pipe(tmp_path / "pipe", source) as path:
        refuses(path, out, "pipe ends after 12")


def test_a_pipe_resumes_under_another_recipe_with_resume_any(source, out, tmp_path):
    run_small(source, out, limit=10)
    longer = make_recipe(max_new_tokens=64)
    with Pipe(tmp_path / "pipe", source) as path:
        statistics = run_small(path, out, longer, resume=True, resume_any=True)
    assert statistics.rows_resumed == 10
    assert run_small(source, out, longer, resume=True).rows_resumed == ROWS


def test_a_refused_first_run_leaves_no_files(tmp_path, out):
    with pytest.raises(UsageError):
        run_small(tmp_path / "missing.jsonl", out)
    assert files_beside(out) == set()
