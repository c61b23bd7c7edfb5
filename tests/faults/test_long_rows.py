"""Rows of many megabytes take memory in proportion to what can be used of them."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

GIBIBYTE = 2**30
ADDRESS_SPACE = 6 * GIBIBYTE
"""What a process may reserve: torch itself reserves two."""


def text_of(size: int) -> str:
    return ("some words of a long document, again and again. " * (size // 48 + 1))[:size]


def run(
    folder: Path, checkpoint: Path, sizes: list[int], truncation: str
) -> tuple[int, list[dict]]:
    """Return the peak of resident memory in bytes, and the rows."""
    source, out, recipe = folder / "in.jsonl", folder / "out.jsonl", folder / "recipe.yaml"
    with source.open("w") as lines:
        for size in sizes:
            lines.write(json.dumps({"prompt": text_of(size)}) + "\n")
    recipe.write_text(
        f"model:\n  path: {checkpoint}\nprompt:\n  truncation: {truncation}\n"
        "generation_config:\n  max_new_tokens: 2\n"
        "continuous_batching_config:\n  num_blocks: 8\n"
    )
    command = [sys.executable, "-m", "cbgen", "run", str(recipe), "-i", str(source)]
    process = subprocess.Popen(
        [*command, "-o", str(out), "--overwrite", "--quiet"],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE)),
    )
    assert process.stderr is not None
    told = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    assert b"Traceback" not in told
    assert process.returncode in (0, 1), told
    with out.open() as rows:
        return usage.ru_maxrss * 1024, [json.loads(row) for row in rows]


@pytest.fixture(scope="module")
def short_rows_peak(checkpoint, tmp_path_factory):
    peak, _ = run(tmp_path_factory.mktemp("short"), checkpoint, [50] * 3, "error")
    return peak


@pytest.mark.parametrize(
    "truncation", ["error", "left", pytest.param("middle", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "sizes",
    [
        [10**6] * 64,
        pytest.param([60 * 10**6], marks=pytest.mark.slow),
        pytest.param([200 * 10**6], marks=pytest.mark.slow),
        pytest.param([10**6] * 1000, marks=pytest.mark.slow),
    ],
    ids=["64 of 1 MB", "60 MB", "200 MB", "1000 of 1 MB"],
)
def test_long_rows_take_less_than_a_gibibyte(
    checkpoint, tmp_path, short_rows_peak, sizes, truncation
):
    peak, rows = run(tmp_path, checkpoint, sizes, truncation)
    assert peak - short_rows_peak < GIBIBYTE
    assert len(rows) == len(sizes)
    for row in rows:
        if truncation == "error":
            assert row["error"]["code"] == "prompt_too_long"
        else:
            assert row["usage"]["prompt_tokens"] == 254
