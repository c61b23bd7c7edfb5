from __future__ import annotations

import gc
import json

import pytest

from cbgen.errors import UsageError
from cbgen.io.inputs import Inputs, Shard
from cbgen.io.row_source import RowSource
from tests.helpers.packed import pack, write_parquet
from tests.helpers.records import error_codes, error_of


@pytest.fixture
def files(tmp_path):
    """Write files of these rows, one for each list, and return the pattern that names them."""

    def write(*lists: list[dict]) -> str:
        for number, rows in enumerate(lists):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / f"in-{number}.jsonl").write_text(lines)
        return str(tmp_path / "in-*.jsonl")

    return write


def test_indexes_go_on_across_files_and_lines_begin_anew(files, tmp_path):
    inputs = Inputs([files([{"id": "a"}, {}], [{}])])
    records = list(inputs.records())
    assert [(record.index, record.line, record.id) for record in records] == [
        (0, 1, "a"),
        (1, 2, 1),
        (2, 1, 2),
    ]
    assert [record.source for record in records] == [
        str(tmp_path / "in-0.jsonl"),
        str(tmp_path / "in-0.jsonl"),
        str(tmp_path / "in-1.jsonl"),
    ]


def test_files_of_all_formats_are_one_input(tmp_path):
    (tmp_path / "1.jsonl").write_bytes(b'{"id":"a"}')
    (tmp_path / "2.gz").write_bytes(pack(b'\n{"id":"b"}', "gzip"))
    (tmp_path / "3.zst").write_bytes(pack(b'nonsense\n{"id":"c"}\n', "zstd"))
    write_parquet(tmp_path / "4.parquet", {"id": ["d", "e"]})
    (tmp_path / "5.jsonl").write_bytes(b"")
    records = list(Inputs([str(tmp_path / "*")]).records())
    assert [record.id for record in records] == ["a", "b", None, "c", "d", "e"]
    assert [record.index for record in records] == list(range(6))


def test_a_limit_may_be_larger_than_any_file(files):
    assert len(list(Inputs([files([{}, {}])], limit=10**500).records())) == 2


def test_the_limit_counts_over_all_files(files):
    inputs = Inputs([files([{}, {}], [{}, {}])], limit=3)
    assert [record.index for record in inputs.records()] == [0, 1, 2]
    assert inputs.max_records == 3


def test_no_file_is_opened_before_its_turn(files, tmp_path):
    inputs = Inputs([files([{}], [{}])])
    (tmp_path / "in-1.jsonl").unlink()
    records = inputs.records()
    assert next(records).index == 0
    with pytest.raises(UsageError, match=r"in-1\.jsonl: the input cannot be opened"):
        next(records)


def test_a_file_is_closed_when_nobody_reads_on(files):
    records = Inputs([files([{}, {}])]).records()
    next(records)
    del records
    gc.collect()  # a file that is left open is a warning, and so an error


def test_a_repeated_id_names_both_files(files):
    inputs = Inputs([files([{}, {"id": "a"}], [{"id": "a"}])])
    source = RowSource(inputs.all_records(), on_duplicate_id="error", shard=inputs.shard)
    records = list(source.records())
    assert error_codes(records) == [None, None, "duplicate_id"]
    message = error_of(records[2]).message
    assert "in-1.jsonl:1: id 'a' was used already at " in message
    assert "in-0.jsonl:2" in message
    assert source.num_repeated_ids == 1


def test_shards_share_out_the_records_and_keep_their_indexes(files):
    pattern = files([{}, {}, {}], [{}, {}])
    shards = [Inputs([pattern], shard=Shard(number, 2)) for number in range(2)]
    assert [[record.index for record in shard.records()] for shard in shards] == [[0, 2, 4], [1, 3]]


def test_the_limit_counts_before_records_are_shared_out(files):
    inputs = Inputs([files([{}] * 9)], limit=5, shard=Shard(1, 2))
    assert [record.index for record in inputs.records()] == [1, 3]
    assert inputs.max_records == 2


def test_every_shard_knows_the_ids_of_the_others(files):
    pattern = files([{"id": "a"}, {"id": "a"}, {"id": "b"}])
    inputs = Inputs([pattern], shard=Shard(1, 2))
    source = RowSource(inputs.all_records(), on_duplicate_id="error", shard=inputs.shard)
    assert error_codes(list(source.records())) == ["duplicate_id"]
    assert source.num_read == 3


def test_a_shard_can_be_empty(files):
    assert list(Inputs([files([{}])], shard=Shard(5, 6)).records()) == []


@pytest.mark.parametrize(
    ("limit", "shard", "count"),
    [(None, None, 5), (4, None, 4), (9, None, 5), (None, Shard(1, 2), 2), (4, Shard(0, 3), 2)],
)
def test_records_are_counted_ahead(tmp_path, limit, shard, count):
    (tmp_path / "1.jsonl").write_bytes(b"{}\n{}")
    (tmp_path / "2.gz").write_bytes(pack(b"{}\n", "gzip"))
    (tmp_path / "3.zst").write_bytes(pack(b"", "zstd"))
    write_parquet(tmp_path / "4.parquet", {"a": [1, 2]})
    assert Inputs([str(tmp_path / "*")], limit=limit, shard=shard).count() == count


def test_what_cannot_be_read_to_its_end_is_not_counted(tmp_path):
    path = tmp_path / "1.gz"
    path.write_bytes(pack(b"{}\n" * 99, "gzip")[:-5])
    assert Inputs([str(path)]).count() is None


def test_stdin_is_not_counted():
    assert Inputs(["-"]).count() is None


@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet", "in.zst"])
def test_content_of_another_kind_is_refused_before_anything_is_read(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(pack(b"{}\n", "gzip"))
    with pytest.raises(UsageError, match=name):
        Inputs([str(path)])
