"""Files of OpenAI Batch and vLLM run-batch, answered by a model and read by the openai package."""

from __future__ import annotations

import json
from pathlib import Path

import orjson
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

import cbgen
from cbgen.errors import UsageError
from cbgen.io.dialects import read_outcome
from cbgen.io.inputs import Inputs
from cbgen.io.json_values import encode_row
from cbgen.io.row_source import RowSource
from cbgen.job.open_job import open_job
from cbgen.job.options import JobOptions
from cbgen.job.report.statistics import JobStatistics
from cbgen.job.run_job import run_job
from cbgen.recipe.load import recipe_from_mapping
from tests.helpers.batch_files import chat_line, completion_line

DATA = Path(__file__).parents[1] / "data"
DIALECTS = ("openai", "vllm")


@pytest.fixture(scope="module")
def recipe(checkpoint):
    return {
        "model": {"path": str(checkpoint)},
        "generation_config": {"max_new_tokens": 3},
        "continuous_batching_config": {"page_size": 16, "max_batch_tokens": 64},
    }


def answer(recipe, dialect) -> list[bytes]:
    """Return the output lines of the dialect's file."""
    inputs = Inputs([str(DATA / f"{dialect}_batch.jsonl")])
    source = RowSource(inputs.all_records(), on_duplicate_id="error", input_format=dialect)
    with open_job(recipe_from_mapping(recipe), None, JobStatistics()) as opened:
        rows = dict(opened.job.rows(source.records()))
    return [encode_row(rows[index]) for index in sorted(rows)]


@pytest.fixture(scope="module")
def answers(recipe):
    return {dialect: answer(recipe, dialect) for dialect in DIALECTS}


@pytest.fixture(scope="module")
def lines(answers):
    return {dialect: [orjson.loads(line) for line in answers[dialect]] for dialect in DIALECTS}


def by_custom_id(lines):
    """Return the first line of each id."""
    return {line["custom_id"]: line for line in reversed(lines)}


def is_answered(line) -> bool:
    """Tell an answer as a reader does that knows both formats."""
    return (
        line["error"] is None
        and line["response"]["status_code"] == 200
        and "choices" in line["response"]["body"]
    )


def given(dialect):
    """Return the custom_id of every line that is JSON."""
    for line in (DATA / f"{dialect}_batch.jsonl").read_text().splitlines():
        try:
            yield json.loads(line).get("custom_id")
        except json.JSONDecodeError:
            yield None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_line_is_answered_once_under_its_id_in_order(lines, dialect):
    assert [line["custom_id"] for line in lines[dialect]] == list(given(dialect))
    assert all(line.keys() == {"id", "custom_id", "response", "error"} for line in lines[dialect])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_openai_package_reads_every_answer(lines, dialect):
    answered = [line for line in lines[dialect] if is_answered(line)]
    assert [line["custom_id"] for line in answered] == {
        "openai": [
            "chat", "chat-sampled", "chat-logprobs", "chat-tools",
            "completion", "completion-echo", "completion-ids", "stop-string",
        ],
        "vllm": [
            "chat", "chat-continued", "chat-variables", "chat-logprobs", "chat-cut",
            "chat-unknown", "completion",
        ],
    }[dialect]  # fmt: skip
    for line in answered:
        body = line["response"]["body"]
        kind = ChatCompletion if body["object"] == "chat.completion" else Completion
        completion = kind.model_validate(body, strict=True)
        usage = completion.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert completion.choices[0].finish_reason in ("stop", "length")


def test_refusals_of_openai_are_responses(lines):
    refused = {
        line["custom_id"]: line["response"]["body"]["error"]["param"]
        for line in lines["openai"]
        if line["response"] is not None and not is_answered(line)
    }
    assert refused == {
        "two-answers": "n",
        "two-prompts": "prompt",
        "too-long": "prompt",
        "hot": "temperature",
        "unknown": "temprature",
        "no-messages": "messages",
        "streamed": "stream",
        "embedding": "url",
        "fetched": "method",
        "no-body": "body",
    }


def test_what_never_ran_has_no_response_of_openai(lines):
    never_ran = [
        (line["custom_id"], line["error"]["code"])
        for line in lines["openai"]
        if line["response"] is None
    ]
    assert never_ran == [
        ("chat", "duplicate_custom_id"),
        (17, "invalid_custom_id"),
        (None, "invalid_json_line"),
        (None, "invalid_custom_id"),
    ]


def test_failures_of_vllm_have_a_status_and_no_body(lines):
    failed = [line for line in lines["vllm"] if not is_answered(line)]
    assert {line["response"]["status_code"] for line in failed} == {400}
    assert {line["response"]["body"] for line in failed} == {None}
    errors = by_custom_id(failed)
    assert isinstance(errors["streamed"]["error"], str)
    assert isinstance(errors["embedding"]["error"], str)
    params = {
        custom_id: line["error"]["error"]["param"]
        for custom_id, line in errors.items()
        if isinstance(line["error"], dict)
    }
    assert params == {
        "two-answers": "n",
        "beam": "use_beam_search",
        "schema": "structured_outputs",
        "both-ends": "continue_final_message",
        "bad-template": "chat_template",
        "wizard": "messages",
        "chat": None,
        None: None,
    }


def test_log_probabilities_are_given_to_the_rows_that_want_them(lines):
    openai = by_custom_id(lines["openai"])
    logprobs = {
        custom_id: openai[custom_id]["response"]["body"]["choices"][0]["logprobs"]
        for custom_id in ("chat", "chat-logprobs", "completion", "completion-ids")
    }
    assert logprobs["chat"] is None
    assert logprobs["completion"] is None
    assert len(logprobs["chat-logprobs"]["content"]) == 4
    assert len(logprobs["completion-ids"]["token_logprobs"]) == 5
    assert all(value <= 0 for value in logprobs["completion-ids"]["token_logprobs"])


def test_options_of_a_body_reach_the_prompt(lines, checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    vllm = by_custom_id(lines["vllm"])

    def prompt(custom_id):
        return tokenizer.decode(vllm[custom_id]["response"]["body"]["prompt_token_ids"])

    assert prompt("chat-variables") == "<|user|>hi</s><|assistant|>"
    assert prompt("chat-cut") == "<|user|>" + "x" * 19


def test_an_echo_begins_with_the_prompt(lines):
    (choice,) = by_custom_id(lines["openai"])["completion-echo"]["response"]["body"]["choices"]
    assert choice["text"].startswith("A token is")


def test_a_recipe_gives_what_a_body_leaves_out(recipe):
    (line,) = cbgen.run(recipe, [chat_line(ignore_eos=True)])
    assert line["response"]["body"]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_second_run_gives_the_same_bytes_but_for_rounded_log_probabilities(
    recipe, answers, dialect
):
    def exact(lines):
        return [line for line in lines if b'"logprobs":{' not in line]

    assert exact(answer(recipe, dialect)) == exact(answers[dialect])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_line_tells_its_index(answers, dialect):
    indexes = [read_outcome(line).index for line in answers[dialect]]
    assert indexes == list(range(len(answers[dialect])))


def test_rows_and_batch_lines_share_a_file(recipe):
    rows = [{"id": "r", "prompt": "a"}, chat_line("c"), completion_line("r")]
    row, line, repeated = cbgen.run(recipe, rows)
    assert (row["id"], row["finish_reason"]) == ("r", "length")
    assert line["response"]["status_code"] == 200
    assert repeated["error"]["code"] == "duplicate_custom_id"


def test_a_stop_string_of_a_batch_line_ends_its_text(recipe):
    recipe = recipe | {"generation_config": {"max_new_tokens": 40}}

    def choice(**body):
        (line,) = cbgen.run(recipe, [completion_line("c", **body)])
        return line["response"]["body"]["choices"][0]

    plain = choice()["text"]
    stop = plain[9:11]
    cut = choice(stop=stop)
    assert (cut["text"], cut["finish_reason"]) == (plain[: plain.index(stop)], "stop")
    assert choice(stop=[stop, "not there"]) == cut


def test_statistics_count_batch_lines(recipe, tmp_path):
    out, statistics = run_file(recipe, tmp_path, input_format="openai")
    assert (statistics.rows_answered, statistics.rows_failed) == (8, 14)
    assert statistics.errors["unsupported_value"] == 2
    assert out.read_bytes().count(b"\n") == 22


def test_strict_ends_at_a_refused_line(recipe, tmp_path):
    with pytest.raises(UsageError, match=r"openai_batch.jsonl:8: .*--strict"):
        run_file(recipe, tmp_path, input_format="openai", strict=True)


def test_batch_lines_may_be_read_as_ordinary_rows(recipe, tmp_path):
    out, statistics = run_file(recipe, tmp_path, input_format="cbgen")
    assert statistics.rows_answered == 1
    assert all("index" in json.loads(line) for line in out.read_text().splitlines())


def run_file(recipe, folder, **options):
    out, statistics = folder / "out.jsonl", JobStatistics()
    inputs = Inputs([str(DATA / "openai_batch.jsonl")])
    job_options = JobOptions(inputs=inputs, output=str(out), overwrite=True, **options)
    run_job(recipe_from_mapping(recipe), job_options, statistics)
    return out, statistics
