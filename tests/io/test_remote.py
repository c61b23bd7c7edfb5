from __future__ import annotations

import sys

import fsspec
import pytest

from cbgen.errors import UsageError
from cbgen.io.input_files import refuse_remote_output
from cbgen.io.inputs import Inputs
from tests.helpers.packed import pack


@pytest.fixture
def store():
    """Put files into the store behind memory://, which is emptied after the test."""
    files = fsspec.filesystem("memory")

    def put(**contents: bytes) -> None:
        for name, content in contents.items():
            files.pipe("/bucket/" + name.replace("__", "."), content)

    yield put
    files.rm("/bucket", recursive=True) if files.exists("/bucket") else None


def test_a_remote_file_is_read_and_named(store):
    store(rows__jsonl=b'{"id":"a"}\n{"id":"b"}\n')
    records = list(Inputs(["memory://bucket/rows.jsonl"]).records())
    assert [record.id for record in records] == ["a", "b"]
    assert records[1].place == "memory://bucket/rows.jsonl:2"


@pytest.mark.parametrize(("kind", "suffix"), [("gzip", "gz"), ("zstd", "zst")])
def test_remote_files_are_unpacked(store, kind, suffix):
    store(**{f"rows__{suffix}": pack(b'{"id":"a"}\n', kind)})
    (record,) = Inputs([f"memory://bucket/rows.{suffix}"]).records()
    assert record.id == "a"


def test_remote_wildcards_are_sorted_naturally(store):
    store(r10__jsonl=b'{"id":"ten"}\n', r9__jsonl=b'{"id":"nine"}\n', other=b"")
    inputs = Inputs(["memory://bucket/r*.jsonl"])
    assert inputs.names == ("memory:///bucket/r9.jsonl", "memory:///bucket/r10.jsonl")
    assert [record.id for record in inputs.records()] == ["nine", "ten"]


def test_remote_rows_are_not_counted_ahead(store):
    store(rows__jsonl=b"{}\n")
    assert Inputs(["memory://bucket/rows.jsonl"]).count() is None


def test_a_remote_file_with_a_wrong_name_is_refused_when_it_is_read(store):
    store(rows__jsonl=pack(b"{}\n", "gzip"))
    with pytest.raises(UsageError, match="holds gzip data"):
        list(Inputs(["memory://bucket/rows.jsonl"]).records())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("memory://bucket/missing.jsonl", "cannot be opened: it does not exist"),
        ("memory://bucket/*.gz", "matches no file"),
        ("memory://bucket", r"is a folder; name its files: 'memory://bucket/\*\.jsonl'"),
        ("nowhere://bucket/a.jsonl", "Protocol not known"),
    ],
)
def test_what_cannot_be_reached_is_refused_by_name(store, path, message):
    store(rows__jsonl=b"{}\n")
    with pytest.raises(UsageError, match=message) as raised:
        Inputs([path])
    assert path in str(raised.value)


def test_without_fsspec_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(UsageError, match=r"pip install 'cbgen\[fsspec\]'"):
        Inputs(["s3://bucket/rows.jsonl"])


def test_a_remote_output_is_refused_with_the_remedy():
    with pytest.raises(UsageError, match=r"s3://bucket/out\.jsonl: .*copy it when"):
        refuse_remote_output("s3://bucket/out.jsonl")


@pytest.mark.parametrize("path", ["-", "out.jsonl", "a:b.jsonl", "./s3://odd/name"])
def test_local_outputs_are_not_refused(path):
    refuse_remote_output(path)
