"""`--resume`, `--resume-any` and `--retry` as a user has them."""

from __future__ import annotations

import json
import re

import pytest

ROWS = [{"id": f"r{number}", "prompt": f"word {number}"} for number in range(6)]
BAD = {"id": "bad", "nothing": 1}


def summary_of(finished):
    """Return what a summary says but for times."""
    lines = [re.sub(r"; .* by an earlier run", "", line) for line in finished.err.splitlines()]
    wanted = ("rows ", "tokens ", "ended by ", "errors ", "output ")
    return [line for line in lines if line.startswith(wanted)]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


@pytest.mark.parametrize(("rows", "code"), [(ROWS, 0), ([*ROWS, BAD], 1)])
def test_a_resume_with_nothing_left_ends_as_the_run_did(cbgen, recipe, rows_file, out, rows, code):
    source = rows_file(*rows)
    first = cbgen("run", recipe, "-i", source, "-o", str(out))
    before = out.read_bytes()
    again = cbgen("run", recipe, "-i", source, "-o", str(out), "--resume")
    assert (first.code, again.code) == (code, code)
    assert out.read_bytes() == before
    assert summary_of(again) == summary_of(first)
    assert f"{len(rows)} of these by an earlier run" in again.err


def test_the_first_run_of_a_job_that_always_resumes_is_an_ordinary_one(
    cbgen, recipe, rows_file, out
):
    assert cbgen("run", recipe, "-i", rows_file(*ROWS), "-o", str(out), "--resume").code == 0
    assert len(out.read_bytes().splitlines()) == len(ROWS)


def test_without_resume_an_existing_output_is_refused_with_the_remedy(
    cbgen, recipe, rows_file, out
):
    source = rows_file(*ROWS)
    cbgen("run", recipe, "-i", source, "-o", str(out))
    refused = cbgen("run", recipe, "-i", source, "-o", str(out))
    assert refused.code == 2
    assert "use --resume to go on with it" in refused.err


def test_retry_length_under_a_longer_limit_redoes_what_was_cut_off(cbgen, recipe, rows_file, out):
    source = rows_file(*ROWS)
    longer = ("--set", "generation_config.max_new_tokens=9")
    cbgen("run", recipe, "-i", source, "-o", str(out))
    refused = cbgen("run", recipe, "-i", source, "-o", str(out), *longer, "--retry", "length")
    assert refused.code == 2
    assert "max_new_tokens was 6 and is 9" in refused.err
    assert "--resume-any" in refused.err
    retried = cbgen(
        "run", recipe, "-i", source, "-o", str(out), *longer, "--retry", "length", "--resume-any"
    )
    assert retried.code == 0
    rows = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert [row["id"] for row in rows] == [row["id"] for row in ROWS]
    assert all(
        row["usage"]["completion_tokens"] == 9 for row in rows if row["finish_reason"] == "length"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume", "--overwrite"], "give one"),
        (["--retry", "error", "--overwrite"], "give one"),
        (["--retry", "errors"], "'errors' is no finish reason of a row"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(cbgen, recipe, rows_file, out, options, message):
    refused = cbgen("run", recipe, "-i", rows_file(*ROWS), "-o", str(out), *options)
    assert refused.code == 2
    assert message in refused.err
    assert not out.exists()


def test_resume_needs_a_file(cbgen, recipe, rows_file):
    refused = cbgen("run", recipe, "-i", rows_file(*ROWS), "--resume")
    assert refused.code == 2
    assert "--resume needs an output file" in refused.err


@pytest.mark.parametrize("input_format", ["openai", "vllm"])
@pytest.mark.parametrize("order", ["input", "completion"])
def test_lines_of_batch_files_resume_too(cbgen, recipe, rows_file, out, input_format, order):
    source = rows_file(
        *(
            {
                "custom_id": f"c{number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": "m", "prompt": f"word {number}", "max_tokens": 3 + number % 2},
            }
            for number in range(5)
        ),
        {"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": {"model": "m"}},
    )
    options = ("run", recipe, "-i", source, "--format", input_format, "--order", order)
    first = cbgen(*options, "-o", str(out))
    whole = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(whole[:2] + whole[4:]) + whole[2][:-5])
    again = cbgen(*options, "-o", str(out), "--resume")
    assert (first.code, again.code) == (1, 1)
    assert "4 of these by an earlier run" in again.err
    assert sorted(out.read_bytes().splitlines(keepends=True)) == sorted(whole)
    retried = cbgen(*options, "-o", str(out), "--retry", "error")
    assert "5 of these by an earlier run" in retried.err
    assert sorted(out.read_bytes().splitlines(keepends=True)) == sorted(whole)
