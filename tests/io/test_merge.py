from __future__ import annotations

import os
import resource
from collections.abc import Iterable

import pytest

from cbgen.errors import UsageError
from cbgen.io.formats.parquet import read_parquet
from cbgen.io.formats.registry import format_of_name
from cbgen.io.json_values import encode_row
from cbgen.io.output.merge import merge_shards
from cbgen.io.output.output_file import journal_path, run_path
from cbgen.io.output.run_file import RunFile, RunHeader
from tests.helpers.packed import pack, unpack

SUFFIXES = {"": "text", ".gz": "gzip", ".zst": "zstd"}


def row_line(index: int, *, failed: bool = False) -> bytes:
    error = {"type": "invalid_row", "code": "no_prompt", "message": "none"} if failed else None
    return encode_row(
        {
            "id": f"q{index}",
            "index": index,
            "text": None if failed else "é" * (index % 7),
            "finish_reason": "error" if failed else "stop",
            "stop_reason": None,
            "usage": None if failed else {"prompt_tokens": 1, "completion_tokens": 2},
            "logprobs": None,
            "error": error,
        }
    )


def write_lines(path: str, lines: Iterable[bytes]) -> None:
    file = format_of_name(path).open_output(path, True)
    file.cut()
    lines = list(lines)
    file.write_all(lambda: iter(lines))
    file.close()


@pytest.fixture
def shards(tmp_path):
    """Write the shards of a run and return their paths."""

    def write(lines: list[bytes], count: int, suffix: str = "") -> list[str]:
        paths = [str(tmp_path / f"shard-{number}.jsonl{suffix}") for number in range(count)]
        for number, path in enumerate(paths):
            write_lines(path, lines[number::count])
        return paths

    return write


@pytest.fixture
def out(tmp_path) -> str:
    return str(tmp_path / "all.jsonl")


def read(path: str) -> bytes:
    with open(path, "rb") as stream:
        return stream.read()


LINES = [row_line(index, failed=index % 40 == 3) for index in range(100)]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("count", [1, 2, 7, 130])
def test_merged_shards_are_the_bytes_of_one_run(shards, out, suffix, count):
    report = merge_shards(out, shards(LINES, count, suffix))
    assert read(out) == b"".join(LINES)
    assert (report.num_shards, report.num_rows, report.num_failed) == (count, 100, 3)
    assert report.is_whole


@pytest.mark.parametrize("present", [[0], [1]])
def test_an_absent_shard_is_named_even_where_no_index_tells(shards, out, present):
    paths = shards(LINES[:2], 2)
    for number, path in enumerate(paths):
        note_run(path, 1, shard=f"{number}/2")
    report = merge_shards(out, [paths[number] for number in present])
    assert report.absent_shards == [f"{1 - present[0]}/2"]
    assert not report.is_whole
    assert not os.path.exists(out)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_the_output_is_packed_by_its_suffix(shards, out, suffix):
    merge_shards(out + suffix, shards(LINES, 3))
    assert unpack(read(out + suffix), SUFFIXES[suffix]) == b"".join(LINES)


def test_parquet_shards_give_a_parquet_file_of_all_rows(shards, tmp_path):
    out = str(tmp_path / "all.parquet")
    report = merge_shards(out, shards(LINES, 3, ".parquet"))
    assert list(read_parquet(out)) == LINES
    assert report.num_failed == 3


def test_shards_may_have_different_suffixes(tmp_path, out):
    names = ["a.jsonl", "b.jsonl.gz", "c.parquet"]
    paths = [str(tmp_path / name) for name in names]
    for number, path in enumerate(paths):
        write_lines(path, LINES[number::3])
    merge_shards(out, paths)
    assert read(out) == b"".join(LINES)


def test_shards_are_found_by_wildcards_in_any_order(shards, out, tmp_path):
    shards(LINES, 12)
    merge_shards(out, [str(tmp_path / "shard-*.jsonl")])
    assert read(out) == b"".join(LINES)


def test_shards_need_not_be_strided(shards, out, tmp_path):
    first, second = str(tmp_path / "1"), str(tmp_path / "2")
    write_lines(first, LINES[:60])
    write_lines(second, LINES[60:])
    merge_shards(out, [second, first])
    assert read(out) == b"".join(LINES)


def test_empty_shards_are_fine(shards, out):
    report = merge_shards(out, shards(LINES[:2], 5))
    assert (report.num_rows, report.is_whole) == (2, True)
    assert merge_shards(out + "2", shards([], 2)).num_rows == 0
    assert read(out + "2") == b""


def test_a_missing_shard_is_found_and_nothing_is_written(shards, out, tmp_path):
    paths = shards(LINES, 10)
    before = set(os.listdir(tmp_path))
    report = merge_shards(out, paths[:4] + paths[5:])
    assert not report.is_whole
    assert (report.missing.count, str(report.missing)) == (10, "4, 14, 24, 34, 44, ...")
    assert report.repeated.count == 0
    assert set(os.listdir(tmp_path)) == before


def test_a_row_that_is_there_twice_is_found(shards, out, tmp_path):
    paths = shards(LINES, 2)
    write_lines(str(tmp_path / "again"), LINES[4:7])
    report = merge_shards(out, [*paths, str(tmp_path / "again")])
    assert (report.repeated.count, str(report.repeated)) == (3, "4, 5, 6")
    assert not os.path.exists(out)


def test_a_row_that_is_twice_in_one_shard_is_found(shards, out):
    report = merge_shards(out, shards([LINES[0], LINES[1], LINES[1]], 1))
    assert str(report.repeated) == "1"


def test_faults_in_parquet_shards_are_found_too(shards, tmp_path):
    out = str(tmp_path / "all.parquet")
    report = merge_shards(out, shards(LINES, 3, ".parquet")[:2])
    assert report.missing.count == 33
    assert not os.path.exists(out)


def test_a_shard_with_a_journal_is_refused_with_the_remedy(shards, out):
    paths = shards(LINES, 2)
    write_lines(journal_path(paths[1]), LINES[3:4])
    with pytest.raises(UsageError, match=r"shard-1\.jsonl: its run has not finished; .*--resume"):
        merge_shards(out, paths)


def test_a_torn_shard_is_refused_with_its_place(shards, out):
    paths = shards(LINES, 2)
    write_lines(paths[1], [*LINES[1:6:2], LINES[7][:-5]])
    with pytest.raises(UsageError, match=r"shard-1\.jsonl:4: is torn; .*--resume"):
        merge_shards(out, paths)
    assert not os.path.exists(out)


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_torn_packed_shard_is_refused(shards, out, tmp_path, kind):
    path = tmp_path / {"gzip": "0.gz", "zstd": "0.zst"}[kind]
    path.write_bytes(pack(b"".join(LINES), kind)[:-20])
    with pytest.raises(UsageError, match=f"{path.name}: cannot be read: the {kind} data ends"):
        merge_shards(out, [str(path)])


def note_run(path: str, num_records: int, recipe: str = "r", shard: str = "0/1") -> None:
    run = RunFile.open(path, RunHeader(recipe_digest=recipe, shard=shard))
    run.begin()
    for number in range(num_records):
        run.note(number.to_bytes(8, "big"))
    run.sync()
    run.close()


def test_rows_that_are_missing_at_the_end_are_found_by_what_the_runs_have_read(shards, out):
    paths = shards(LINES[:98], 2)
    assert merge_shards(out, paths).is_whole
    for path in paths:
        note_run(path, 50)
    report = merge_shards(out, paths, overwrite=True)
    assert str(report.missing) == "98, 99"


def test_shards_of_different_recipes_are_joined_with_a_warning(shards, out, caplog):
    for path, recipe in zip(shards(LINES, 2), "rs", strict=True):
        note_run(path, 50, recipe)
    assert merge_shards(out, [out.replace("all", "shard-?")]).is_whole
    assert "made with 2 different recipes" in caplog.text


def test_what_is_no_output_is_refused_with_its_place(tmp_path, out):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINES[0] + b'{"prompt":"a"}\n')
    with pytest.raises(UsageError, match=r"rows\.jsonl:2: is no row of cbgen's"):
        merge_shards(out, [str(path)])


def test_rows_in_order_of_completion_are_refused_with_the_remedy(tmp_path, out):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINES[0] + LINES[4] + LINES[2])
    with pytest.raises(UsageError, match=r"rows\.jsonl:3: row 2 stands behind row 4; .*order"):
        merge_shards(out, [str(path)])


def test_an_existing_output_is_refused_unless_it_may_be_replaced(shards, out):
    paths = shards(LINES, 2)
    write_lines(out, [b"earlier\n"])
    with pytest.raises(UsageError, match="already exists; use --overwrite"):
        merge_shards(out, paths)
    assert read(out) == b"earlier\n"
    merge_shards(out, paths, overwrite=True)
    assert read(out) == b"".join(LINES)


def test_a_failed_merge_leaves_the_earlier_output(shards, out):
    write_lines(out, [b"earlier\n"])
    merge_shards(out, shards(LINES, 2)[:1], overwrite=True)
    assert read(out) == b"earlier\n"


def test_notes_about_the_earlier_output_go_with_it(shards, out):
    for path in (out, journal_path(out), run_path(out)):
        write_lines(path, [b"earlier\n"])
    merge_shards(out, shards(LINES, 2), overwrite=True)
    assert not os.path.exists(journal_path(out))
    assert not os.path.exists(run_path(out))


def test_a_shard_cannot_be_the_output(shards):
    paths = shards(LINES, 2)
    with pytest.raises(UsageError, match="name another file"):
        merge_shards(paths[0], paths, overwrite=True)


def test_stdin_is_no_shard(out):
    with pytest.raises(UsageError, match="give files"):
        merge_shards(out, ["-"])


def test_a_missing_file_is_refused(out, tmp_path):
    with pytest.raises(UsageError, match="missing: is no file"):
        merge_shards(out, [str(tmp_path / "missing")])


@pytest.fixture
def few_open_files():
    """Allow a few more files than are open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_thousand_shards_need_few_open_files(shards, out, few_open_files, suffix):
    lines = [row_line(index) for index in range(2500)]
    report = merge_shards(out, shards(lines, 1000, suffix))
    assert report.num_shards == 1000
    assert read(out) == b"".join(lines)
