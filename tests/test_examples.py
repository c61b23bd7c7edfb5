"""Every file of examples/ does what its first lines promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tests.helpers.commands import Command
from tests.helpers.sources import ROOT

EXAMPLES = ROOT / "examples"
MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def run_python(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def output_rows(tmp_path_factory) -> list[dict]:
    """Output rows of both example inputs, answered in one run by the small real model."""
    out = tmp_path_factory.mktemp("examples") / "out.jsonl"
    inputs = [str(EXAMPLES / name) for name in ("prompts.jsonl", "openai_batch.jsonl")]
    command = Command(
        "run",
        str(ROOT / "recipes" / "smollm2.yaml"),
        "-o",
        str(out),
        "-i",
        inputs[0],
        "-i",
        inputs[1],
    )
    assert command.wait() == 1, command.err.text  # one line asks for two answers
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture(scope="module")
def answers(output_rows) -> dict[str, dict]:
    """The output rows of examples/prompts.jsonl by id."""
    return {row["id"]: row for row in output_rows if "custom_id" not in row}


def test_prompts_jsonl_is_answered_row_by_row_in_order(answers):
    asked = [
        json.loads(line)["id"] for line in (EXAMPLES / "prompts.jsonl").read_text().splitlines()
    ]
    assert list(answers) == asked


def test_prompts_jsonl_gets_real_answers(answers):
    assert "Paris" in answers["france"]["text"]


def test_a_rows_own_generation_config_counts(answers):
    assert answers["brief"]["usage"]["completion_tokens"] <= 16


def test_openai_batch_jsonl_is_answered_in_its_own_form(output_rows):
    lines = {row["custom_id"]: row["response"] for row in output_rows if "custom_id" in row}
    bodies = {custom_id: response["body"] for custom_id, response in lines.items()}
    france = ChatCompletion.model_validate(bodies["request-france"])
    assert "Paris" in france.choices[0].message.content
    sky = Completion.model_validate(bodies["request-sky"])
    assert len(sky.choices[0].logprobs.tokens) == sky.usage.completion_tokens == 8
    assert list(lines) == [f"request-{name}" for name in ("france", "colours", "sky", "two")]
    assert lines["request-two"]["status_code"] == 400
    assert bodies["request-two"]["error"]["param"] == "n"


def test_print_answers_shows_question_answer_and_error(tmp_path):
    rows = [
        {"id": "a", "prompt": "Why?", "text": " Because. ", "error": None},
        {
            "id": "b",
            "messages": [{"content": "Who?"}],
            "text": None,
            "error": {"message": "too long"},
        },
        {"id": "c", "prompt": "never shown", "text": "", "error": None},
    ]
    out = tmp_path / "out.jsonl"
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    finished = run_python(EXAMPLES / "print_answers.py", out, "2")
    assert finished.stdout == "[a] Why?\n    Because.\n\n[b] Who?\n    error: too long\n\n"


@pytest.fixture
def slurm_task(tmp_path):
    """Run a task of slurm_array.sh; Slurm's commands and cbgen are stubs that tell what they got.

    Returns the exit code and the lines that the stubs wrote.
    """
    stubs = {"srun": 'exec "$@"', "scontrol": ":", "cbgen": "exit $CODE"}
    for name, command in stubs.items():
        path = tmp_path / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> "$CALLS"\n{command}\n')
        path.chmod(0o755)

    def run(code: int) -> tuple[int, list[str]]:
        calls = tmp_path / "calls"
        environment = {
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "CALLS": str(calls),
            "CODE": str(code),
            "SLURM_ARRAY_JOB_ID": "77",
            "SLURM_ARRAY_TASK_ID": "3",
        }
        finished = subprocess.run(
            ["bash", EXAMPLES / "slurm_array.sh", "recipe.yaml", "rows/*.gz", tmp_path / "answers"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return finished.returncode, calls.read_text().splitlines()

    return run


def test_slurm_array_sh_answers_the_shard_of_its_task(slurm_task, tmp_path):
    code, calls = slurm_task(0)
    assert code == 0
    assert calls[1:] == [
        f"cbgen run recipe.yaml -i rows/*.gz -o {tmp_path}/answers/shard-3.jsonl --shard 3/8 "
        "--resume --requeue-signal USR1"
    ]
    assert (tmp_path / "answers").is_dir()


@pytest.mark.parametrize(("code", "expected"), [(1, 0), (2, 2), (3, 3), (143, 143)])
def test_slurm_array_sh_fails_as_the_run_does_but_for_failed_rows(slurm_task, code, expected):
    assert slurm_task(code)[0] == expected


def test_slurm_array_sh_is_queued_again_when_its_time_is_up(slurm_task):
    code, calls = slurm_task(4)
    assert (code, calls[-1]) == (0, "scontrol requeue 77_3")


def test_slurm_array_sh_has_as_many_shards_as_tasks():
    text = (EXAMPLES / "slurm_array.sh").read_text()
    assert "#SBATCH --array=0-7\n" in text
    assert "\nnum_shards=8 " in text


def test_fetch_smollm2_leaves_a_right_file_alone(tmp_path):
    cached = Path.home() / ".cache" / "cbgen" / "models" / MODEL_NAME
    before = cached.stat()
    finished = run_python(EXAMPLES / "fetch_smollm2.py", PIP_NO_INDEX="1", TMPDIR=str(tmp_path))
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, f"{cached}\n", "")
    assert cached.stat().st_mtime_ns == before.st_mtime_ns


def test_fetch_smollm2_says_what_to_do_when_pip_fails_and_leaves_nothing(tmp_path):
    finished = run_python(
        EXAMPLES / "fetch_smollm2.py",
        HOME=str(tmp_path),
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(tmp_path),
        PIP_CONFIG_FILE=os.devnull,
    )
    assert finished.returncode == 1
    assert "check the network" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert list(tmp_path.rglob("*.gguf*")) == []
