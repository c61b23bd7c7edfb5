"""Several inputs, packed and shared out, and joined again: the same bytes as one run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.helpers.commands import jsonl
from tests.helpers.packed import pack, unpack, write_parquet

ROWS = [
    *({"id": f"q{number}", "prompt": "word " * (number % 5 + 1)} for number in range(7)),
    {"id": "q3", "prompt": "used twice"},
    b"nonsense",
    {"prompt": "without id", "generation_config": {"temperature": 1.0}},
]


@pytest.fixture
def inputs(tmp_path) -> list[str]:
    """The rows in two files of different formats."""
    (tmp_path / "in-1.jsonl").write_bytes(jsonl(*ROWS[:4]))
    (tmp_path / "in-2.jsonl.gz").write_bytes(pack(jsonl(*ROWS[4:]), "gzip"))
    return ["-i", str(tmp_path / "in-*.jsonl*")]


def test_several_inputs_are_answered_as_one(cbgen, recipe, inputs, tmp_path):
    finished = cbgen("run", recipe, *inputs)
    assert finished.code == 1
    assert [row["index"] for row in finished.rows] == list(range(10))
    message = finished.rows[7]["error"]["message"]
    assert "in-2.jsonl.gz:4: id 'q3' was used already at " in message
    assert "in-1.jsonl:4" in message
    assert finished.rows[8]["error"]["code"] == "invalid_json"
    one = cbgen("run", recipe, "-i", str(tmp_path / "in-1.jsonl"))
    assert finished.out.startswith(one.out)


def test_repeated_inputs_keep_their_order(cbgen, recipe, inputs, tmp_path):
    names = [str(tmp_path / name) for name in ("in-2.jsonl.gz", "in-1.jsonl")]
    finished = cbgen("run", recipe, "-i", names[0], "-i", names[1])
    assert [row["id"] for row in finished.rows[:3]] == ["q4", "q5", "q6"]
    assert "in-2.jsonl.gz and 1 more file ->" in finished.err


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_merged_shards_equal_the_run_that_was_not_shared_out(
    cbgen, recipe, inputs, tmp_path, suffix
):
    whole, merged = tmp_path / "whole.jsonl", tmp_path / f"merged.jsonl{suffix}"
    assert cbgen("run", recipe, *inputs, "-o", str(whole)).code == 1
    for number in range(3):
        out = str(tmp_path / f"shard-{number}.jsonl{suffix}")
        finished = cbgen("run", recipe, *inputs, "--shard", f"{number}/3", "-o", out)
        assert f"(shard {number}/3)" in finished.err
    finished = cbgen("merge", str(merged), str(tmp_path / f"shard-*.jsonl{suffix}"))
    assert finished.code == 1
    assert f"{merged}: 10 rows, 2 of them failed, from 3 shards" in finished.err
    data = merged.read_bytes()
    assert (unpack(data, {".gz": "gzip", ".zst": "zstd"}[suffix]) if suffix else data) == (
        whole.read_bytes()
    )


def test_parquet_is_answered_as_jsonl_is(cbgen, recipe, tmp_path):
    rows = [{"id": f"q{number}", "prompt": "word " * number} for number in range(1, 5)]
    (tmp_path / "in.jsonl").write_bytes(jsonl(*rows))
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    path = write_parquet(tmp_path / "in.parquet", columns)
    assert cbgen("run", recipe, "-i", path).out == (
        cbgen("run", recipe, "-i", str(tmp_path / "in.jsonl")).out
    )


def test_a_merge_without_failed_rows_is_a_success(cbgen, tmp_path):
    line = '{"id":"a","index":0,"text":"","finish_reason":"stop","error":null}\n'
    (tmp_path / "shard").write_text(line)
    finished = cbgen("merge", "-", str(tmp_path / "shard"))
    assert (finished.code, finished.out) == (0, line)
    assert "stdout: 1 row, from 1 shard" in finished.err


def test_a_merge_that_lacks_rows_names_the_first_and_how_many(cbgen, tmp_path):
    line = '{"id":"a","index":2,"text":"","finish_reason":"stop","error":null}\n'
    (tmp_path / "shard").write_text(line * 2)
    out = tmp_path / "out.jsonl"
    finished = cbgen("merge", str(out), str(tmp_path / "shard"))
    assert finished.code == 1
    assert "error: 2 rows missing: index 0, 1" in finished.err
    assert "error: 1 row repeated: index 2" in finished.err
    assert f"{out} is not written" in finished.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-i", "missing-*.jsonl"], "missing-*.jsonl: matches no file"),
        (["-i", "-", "--shard", "4/4"], "0/4 to 3/4"),
        (["-i", "-", "--shard", "/8"], "expected i/n"),
        (["-i", "-", "-i", "-"], "-: is given twice"),
        (["-i", "-", "-o", "s3://bucket/out.jsonl"], "local files alone"),
    ],
)
def test_wrong_inputs_end_with_2(cbgen, recipe, arguments, message):
    finished = cbgen("run", recipe, *arguments)
    assert finished.code == 2
    assert message in finished.err


def test_the_output_is_compared_with_each_input(cbgen, recipe, inputs, tmp_path):
    out = str(tmp_path / "in-2.jsonl.gz")
    finished = cbgen("run", recipe, *inputs, "-o", out, "--overwrite")
    assert finished.code == 2
    assert f"the output is already the input file {out}" in finished.err


def test_a_torn_input_gives_the_rows_before_it_and_ends_with_2(cbgen, recipe, tmp_path):
    lines = jsonl(*({"prompt": "word"} for _ in range(3)))
    path, out = tmp_path / "in.gz", tmp_path / "out.jsonl"
    path.write_bytes(gzip.compress(lines) + gzip.compress(lines)[:-6])
    finished = cbgen("run", recipe, "-i", str(path), "-o", str(out))
    assert finished.code == 2
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(len(rows)))
    assert len(rows) >= 3
    assert f"in.gz: cannot be read beyond line {len(rows)}: the gzip data ends" in finished.err


def test_a_torn_input_that_was_mended_is_resumed(cbgen, recipe, tmp_path):
    lines = jsonl(*({"prompt": "word " * number} for number in range(1, 5)))
    path, out = tmp_path / "in.gz", tmp_path / "out.jsonl"
    path.write_bytes(pack(lines, "gzip") + pack(lines, "gzip")[:-6])
    assert cbgen("run", recipe, "-i", str(path), "-o", str(out)).code == 2
    path.write_bytes(pack(lines * 2, "gzip"))
    assert cbgen("run", recipe, "-i", str(path), "-o", str(out), "--resume").code == 0
    whole = cbgen("run", recipe, "-i", str(path))
    assert Path(out).read_text() == whole.out
