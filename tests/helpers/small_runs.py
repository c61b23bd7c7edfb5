"""Whole runs without a model: real files, and answers that are a function of the record."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cbgen.io.inputs import Inputs
from cbgen.io.records import Record
from cbgen.job.options import JobOptions
from cbgen.job.report.statistics import JobStatistics
from cbgen.job.run_job import JobFiles
from cbgen.recipe.load import recipe_from_mapping
from cbgen.recipe.schema import Recipe

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_IN_FLIGHT = 5


def write_input(folder: Path, count: int, changes: dict[int, str] | None = None) -> Path:
    """Write rows to in.jsonl, some with another prompt than usual, and return its path."""
    prompts = {index: f"question {index}" for index in range(count)} | (changes or {})
    path = folder / "in.jsonl"
    rows = ({"id": f"r{index}", "prompt": text, "n": index} for index, text in prompts.items())
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_recipe(order: str = "input", max_new_tokens: int = 4) -> Recipe:
    """Return a recipe for a model that nobody loads."""
    return recipe_from_mapping(
        {
            "model": {"path": "nowhere"},
            "generation_config": {"max_new_tokens": max_new_tokens},
            "output": {"order": order},
        }
    )


def run_small(
    source: Path | str,
    output: Path | str,
    recipe: Recipe | None = None,
    *,
    written: list[int] | None = None,
    **options: Any,
) -> JobStatistics:
    """Answer the rows of a file as a run does, five in flight, which finish in any order.

    `written` gets the index of each row that is safe.
    """
    statistics = JobStatistics()
    limit, shard = options.pop("limit", None), options.pop("shard", None)
    job_options = JobOptions(
        inputs=Inputs([str(source)], limit=limit, shard=shard), output=str(output), **options
    )
    recipe = recipe or make_recipe()
    files = JobFiles(recipe, job_options, statistics)
    with files.writer:
        records = files.records()
        in_flight: list[Record] = []
        while True:
            in_flight.extend(_take(records, _IN_FLIGHT - len(in_flight)))
            if not in_flight:
                break
            record = in_flight.pop(3 * statistics.rows_done % len(in_flight))
            row = answer_of(record, recipe.generation_config["max_new_tokens"])
            if row["error"] is None:
                statistics.count_answer(
                    [row["finish_reason"]], prompt_tokens=1, completion_tokens=2
                )
            else:
                statistics.count_failure(row["error"]["code"])
            files.write(record.index, row)
            if written is not None:
                written.append(record.index)
    return statistics


def answer_of(record: Record, max_new_tokens: int = 4) -> dict[str, Any]:
    """Return the output row of a record; one in four ends by length, one in five fails."""
    columns = record.columns
    assert columns is not None
    row: dict[str, Any] = {"id": record.id, "index": record.index, **columns}
    row |= {"text": None, "finish_reason": "error", "stop_reason": None, "usage": None}
    row |= {"logprobs": None, "error": None}
    if record.index % 5 == 4:
        row["error"] = {"type": "invalid_row", "code": "bad", "message": "it is bad"}
        return row
    is_cut = record.index % 4 == 1 and max_new_tokens < 10
    row["text"] = f"{max_new_tokens} words on {columns['prompt']}: " + "la " * record.index
    row["finish_reason"] = "length" if is_cut else "stop"
    row["usage"] = {"prompt_tokens": 1, "completion_tokens": 2}
    return row


def read_output(path: Path | str) -> list[dict[str, Any]]:
    """Return the rows of an output file."""
    path = Path(path)
    if path.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        with ParquetFile(path) as file:
            return file.read().to_pylist()
    return [json.loads(line) for line in unpacked(path).splitlines()]


def unpacked(path: Path) -> bytes:
    """Return the lines of a file that is no parquet."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        return gzip.decompress(data) if data else b""
    if path.suffix == ".zst":
        import zstandard

        return zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    return data


def assert_same_output(path: Path, reference: Path, order: str = "input") -> None:
    """Check that an output holds the rows of an undisturbed one, and that nothing is left over."""
    rows, expected = read_output(path), read_output(reference)
    if order == "completion":
        rows, expected = (sorted(rows, key=lambda row: row["index"]) for rows in (rows, expected))
    assert rows == expected
    if order == "input" and path.suffix != ".parquet":
        assert unpacked(path) == unpacked(reference)
    assert files_beside(path) == {"", ".run"}


def files_beside(path: Path) -> set[str]:
    """Return what an output's files are called behind its own name."""
    return {file.name.removeprefix(path.name) for file in path.parent.glob(path.name + "*")}


def _take(records: Iterator[Record], count: int) -> Iterator[Record]:
    for _, record in zip(range(count), records, strict=False):
        yield record
