"""What rows cost beside the model: a million of them from .zst through a stub engine, and merged.

    python -m pytest -m bench -s benchmarks/bench_io.py

Everything but the engine is real. Reading, ordering and writing are measured on one thread, with
rows that finish in the worst order within groups of 64; then all threads of a whole job, whose
other part is preparing requests, building rows, and waiting for each other.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

NUM_ROWS = 1_000_000
MOST_MICROSECONDS = 20
MOST_BYTES = 16
SLACK_BYTES = 24 * 2**20  # what the allocators keep, and how far a table may be ahead

# Runs in a process of its own, so that memory and CPU time are its own.
SCRIPT = """
import gc, json, os, sys, time
from contextlib import contextmanager

from cbgen.io.inputs import Inputs
from cbgen.job.gc_pauses import gc_ignores_existing_objects
from cbgen.job.options import JobOptions
import cbgen.job.open_job as open_job
from cbgen.job.report.statistics import JobStatistics
from cbgen.job.run_job import JobFiles, run_job
from cbgen.recipe.load import recipe_from_mapping
from tests.helpers.jobs import make_stub_job

source, target = sys.argv[1:]
recipe = recipe_from_mapping({"model": {"path": "stub"}})
options = JobOptions(inputs=Inputs([source]), output=target, overwrite=True)

def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

memory = []

@contextmanager
def stub_job(*_):
    job = make_stub_job(keeps_ids=False, max_in_flight=1024).job
    rows = job.rows
    def watched_rows(*arguments, **options):
        for number, row in enumerate(rows(*arguments, **options), 1):
            if number % 100_000 == 0:
                memory.append((number, resident_bytes()))
            yield row
    job.rows = watched_rows
    yield open_job.OpenJob(job, None, None, [])

open_job.open_job = stub_job
started, clock = time.process_time(), time.monotonic()
statistics = JobStatistics()
run_job(recipe, options, statistics)
num_rows = statistics.rows_written
figures = {
    "rows": num_rows,
    "rows_per_second": num_rows / (time.monotonic() - clock),
    "all_microseconds": 1e6 * (time.process_time() - started) / num_rows,
    "memory": memory,
}

def write(files, group):
    for record in reversed(group):
        files.write(record.index, {
            "id": record.id, "index": record.index, "text": "an answer", "finish_reason": "stop",
            "stop_reason": None, "usage": {"prompt_tokens": 1, "completion_tokens": 2},
            "logprobs": None, "error": None,
        })
    group.clear()

started = time.process_time()
files = JobFiles(recipe, options, JobStatistics())
with gc_ignores_existing_objects(), files.writer:
    group = []
    for record in files.records():
        group.append(record)
        if len(group) == 64:
            write(files, group)
    write(files, group)
figures["io_microseconds"] = 1e6 * (time.process_time() - started) / num_rows
print(json.dumps(figures))
"""

MERGE_SCRIPT = """
import json, resource, sys, time
from cbgen.io.output.merge import merge_shards
started = time.process_time()
report = merge_shards(sys.argv[1], sys.argv[2:])
print(json.dumps({
    "rows": report.num_rows,
    "microseconds": 1e6 * (time.process_time() - started) / report.num_rows,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
}))
"""


def run_script(script: str, *arguments: str) -> dict:
    ran = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def million_rows(tmp_path_factory) -> str:
    import zstandard

    path = tmp_path_factory.mktemp("rows") / "in.jsonl.zst"
    with open(path, "wb") as file, zstandard.ZstdCompressor().stream_writer(file) as stream:
        for number in range(NUM_ROWS):
            row = {
                "id": f"q{number}",
                "prompt_token_ids": [10 + number % 50],
                "question": f"What is the capital of country number {number}?",
            }
            stream.write(json.dumps(row).encode() + b"\n")
    return str(path)


@pytest.mark.bench
@pytest.mark.parametrize("suffix", [".jsonl", ".zst"])
def test_reading_ordering_and_writing_cost_little(million_rows, tmp_path, suffix):
    """Under 20 microseconds of CPU a row, in memory that grows by 16 bytes a row."""
    figures = run_script(SCRIPT, million_rows, str(tmp_path / f"out{suffix}"))
    (early, before), *_, (late, after) = figures["memory"]
    growth = (after - before) / (late - early)
    sys.stderr.write(
        f"\n.zst to {suffix}: {figures['rows']:,} rows, {figures['rows_per_second']:,.0f} rows/s; "
        f"CPU a row: reading, ordering, writing {figures['io_microseconds']:.1f} us, whole job "
        f"{figures['all_microseconds']:.1f} us; memory {after / 2**20:.0f} MiB, "
        f"{growth:+.1f} bytes a row\n"
    )
    assert figures["rows"] == NUM_ROWS
    assert figures["io_microseconds"] < MOST_MICROSECONDS
    assert after - before < MOST_BYTES * (late - early) + SLACK_BYTES


@pytest.mark.bench
@pytest.mark.parametrize(("suffix", "num_shards"), [("", 8), ("", 1000), (".zst", 1000)])
def test_merging_costs_little(tmp_path, suffix, num_shards):
    from tests.helpers.packed import pack

    num_rows = 200_000
    paths = []
    for number in range(num_shards):
        rows = (
            f'{{"id":"q{index}","index":{index},"text":"{"answer " * 20}","finish_reason":"stop",'
            f'"usage":{{"prompt_tokens":1,"completion_tokens":2}},"error":null}}\n'
            for index in range(number, num_rows, num_shards)
        )
        data = "".join(rows).encode()
        path = tmp_path / f"shard-{number}.jsonl{suffix}"
        path.write_bytes(pack(data, "zstd") if suffix else data)
        paths.append(str(path))
    figures = run_script(MERGE_SCRIPT, str(tmp_path / "all.jsonl"), *paths)
    sys.stderr.write(
        f"\nmerge of {num_shards} shards{suffix and f' ({suffix})'}: {figures['microseconds']:.1f} "
        f"us of CPU a row, peak memory {figures['peak_bytes'] / 2**20:.0f} MiB\n"
    )
    assert figures["rows"] == num_rows
    assert figures["microseconds"] < MOST_MICROSECONDS
