"""Rows of several samples, answered by a model into files and read back."""

from __future__ import annotations

import json

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

import cbgen
from cbgen.errors import RecipeError, UsageError
from cbgen.io.inputs import Inputs
from cbgen.job.open_job import open_job
from cbgen.job.options import JobOptions
from cbgen.job.report.statistics import JobStatistics
from cbgen.job.run_job import run_job
from cbgen.recipe.load import load_recipe, recipe_from_mapping
from tests.helpers.batch_files import chat_line, completion_line
from tests.helpers.jobs import records_of
from tests.helpers.small_runs import read_output, run_small, write_input

ROWS = [{"id": f"r{number}", "prompt": "word " * number} for number in range(1, 5)]


@pytest.fixture
def recipe(checkpoint):
    return {
        "model": {"path": str(checkpoint)},
        "generation_config": {
            "max_new_tokens": 6,
            "temperature": 1.0,
            "num_return_sequences": 3,
        },
        "continuous_batching_config": {"page_size": 16, "max_batch_tokens": 64},
    }


def changed(recipe, **generation):
    config = {**recipe["generation_config"], **generation}
    return {**recipe, "generation_config": config}


def answer_file(recipe, tmp_path, name="out.jsonl", rows=ROWS, **options):
    """Run a job on rows and return the output rows and the statistics."""
    source, output = tmp_path / "in.jsonl", tmp_path / name
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    statistics = JobStatistics()
    job_options = JobOptions(inputs=Inputs([str(source)]), output=str(output), **options)
    run_job(recipe_from_mapping(recipe), job_options, statistics)
    return read_output(output), statistics


def test_samples_differ_and_the_first_is_the_answer_of_a_single_one(recipe):
    several = list(cbgen.run(recipe, ROWS))
    single = list(cbgen.run(changed(recipe, num_return_sequences=1), ROWS))
    for row, alone in zip(several, single, strict=True):
        texts = [choice["text"] for choice in row["choices"]]
        assert texts[0] == alone["text"]
        assert len(set(texts)) == 3


def test_more_samples_begin_with_the_same_ones(recipe):
    three = list(cbgen.run(recipe, ROWS))
    for row, of_five in zip(
        three, cbgen.run(changed(recipe, num_return_sequences=5), ROWS), strict=True
    ):
        assert row["choices"] == of_five["choices"][:3]


def test_a_rows_own_seed_gives_the_same_samples_under_any_id(recipe):
    config = {"seed": 7}
    rows = [{"id": name, "prompt": "a", "generation_config": config} for name in "ab"]
    one, other = cbgen.run(recipe, rows)
    assert one["choices"] == other["choices"]
    assert len({choice["text"] for choice in one["choices"]}) == 3


def test_usage_counts_the_prompt_once_and_all_samples(recipe):
    rows = list(cbgen.run({**recipe, "output": {"token_ids": True}}, ROWS))
    for row in rows:
        assert row["usage"]["prompt_tokens"] == len(row["prompt_token_ids"])
        lengths = [len(choice["token_ids"]) for choice in row["choices"]]
        assert row["usage"]["completion_tokens"] == sum(lengths)


def test_log_probabilities_are_those_of_each_sample(recipe):
    recipe["continuous_batching_config"]["return_logprobs"] = True
    (row,) = cbgen.run({**recipe, "output": {"token_ids": True}}, ROWS[:1])
    for choice in row["choices"]:
        assert choice["logprobs"]["token_ids"] == choice["token_ids"]


def test_sharing_of_blocks_changes_no_row(recipe):
    rows = [{"prompt": f"{'ab'[number % 2] * 20} {number}"} for number in range(12)]
    shared = list(cbgen.run(recipe, rows))
    recipe["continuous_batching_config"]["allow_block_sharing"] = False
    assert list(cbgen.run(recipe, rows)) == shared


@pytest.mark.parametrize(("shared", "expected"), [(True, ["1", "0"]), (False, ["0", "1"])])
def test_the_recipe_says_whether_requests_are_sorted_by_their_prompts(recipe, shared, expected):
    recipe["continuous_batching_config"]["allow_block_sharing"] = shared
    checked = recipe_from_mapping(changed(recipe, num_return_sequences=1))
    with open_job(checked, None, JobStatistics()) as opened:
        preparer = opened.preparer
        rows = [{"prompt_token_ids": [9]}, {"prompt_token_ids": [5]}]
        requests = preparer.submission(preparer.prepare(list(records_of(rows))))
    assert [request.request_id for request in requests] == expected


def test_ids_that_look_like_those_of_samples_confuse_nobody(recipe):
    names = ["a", "a#0", "a#1", "a#1#0", "#"]
    rows = [{"id": name, "prompt": "a"} for name in names]
    one = {"generation_config": {"num_return_sequences": 1}}
    for number in (1, 3):
        rows[number] |= one
    answered = list(cbgen.run(recipe, rows))
    assert [row["id"] for row in answered] == names
    assert all(row["error"] is None for row in answered)
    assert ["choices" in row for row in answered] == [True, False, True, False, True]


def test_a_greedy_row_of_several_samples_fails_alone(recipe):
    greedy = {"prompt": "a", "generation_config": {"temperature": 0}}
    first, failed, last = cbgen.run(recipe, [ROWS[0], greedy, ROWS[1]])
    assert failed["error"]["code"] == "invalid_generation_config"
    assert "num_return_sequences = 3" in failed["error"]["message"]
    assert len(first["choices"]) == len(last["choices"]) == 3


def test_several_samples_that_nothing_makes_differ_are_refused(recipe):
    del recipe["generation_config"]["temperature"]
    with pytest.raises(UsageError, match=r"generation_config\.num_return_sequences = 3"):
        list(cbgen.run(recipe, ROWS))


def test_a_recipe_that_contradicts_itself_is_refused_with_its_line(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: {path: m}\ngeneration_config:\n  do_sample: false\n  num_return_sequences: 2\n"
    )
    with pytest.raises(RecipeError, match=r"recipe\.yaml:4: .*num_return_sequences = 2"):
        load_recipe(str(path))


def test_the_statistics_count_rows_once_and_answers_all(recipe, tmp_path):
    rows, statistics = answer_file(recipe, tmp_path)
    assert statistics.rows_answered == len(ROWS)
    assert statistics.num_answers == 3 * len(ROWS)
    usage = [row["usage"] for row in rows]
    assert statistics.prompt_tokens == sum(item["prompt_tokens"] for item in usage)
    assert statistics.completion_tokens == sum(item["completion_tokens"] for item in usage)


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_resume_with_nothing_left_counts_the_same(recipe, tmp_path, name):
    rows, first = answer_file(recipe, tmp_path, name)
    again_rows, again = answer_file(recipe, tmp_path, name, resume=True)
    assert again_rows == rows
    assert again.total() == first.total()


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_rows_that_are_redone_equal_those_of_an_undisturbed_run(recipe, tmp_path, name):
    rows, _ = answer_file(recipe, tmp_path, name)
    retry = frozenset({"length"})
    again, statistics = answer_file(recipe, tmp_path, name, resume=True, retry=retry)
    assert statistics.rows_answered > 0
    assert again == rows


def test_a_parquet_file_holds_the_choices_of_the_lines(recipe, tmp_path):
    rows = [*ROWS, {"id": "one", "prompt": "a", "generation_config": {"num_return_sequences": 1}}]
    lines, _ = answer_file(recipe, tmp_path, rows=rows)
    table, _ = answer_file(recipe, tmp_path, "out.parquet", rows=rows)
    for row, held in zip(lines, table, strict=True):
        assert held["text"] == row.get("text")
        assert held["usage"] == row["usage"]
        reasons = [choice["finish_reason"] for choice in row.get("choices", ())]
        assert [choice["finish_reason"] for choice in held["choices"] or ()] == reasons
        texts = [choice["text"] for choice in row.get("choices", ())]
        assert [choice["text"] for choice in held["choices"] or ()] == texts


def test_retry_redoes_a_row_of_which_one_sample_ended_so(tmp_path):
    source, out = write_input(tmp_path, 20), tmp_path / "out.jsonl"
    run_small(source, out)
    rows = read_output(out)
    for index, reasons in ((0, ("stop", "length")), (2, ("stop", "stop"))):
        row = rows[index]
        for name in ("text", "finish_reason", "stop_reason", "logprobs"):
            del row[name]
        row["choices"] = [{"text": "a", "finish_reason": reason} for reason in reasons]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    written: list[int] = []
    retry = frozenset({"length"})
    statistics = run_small(source, out, resume=True, retry=retry, written=written)
    assert sorted(written) == [0, 1, 5, 13, 17]
    assert statistics.resumed.finish_reasons["stop"] == 10 + 2


@pytest.mark.parametrize(
    ("line", "kind"), [(chat_line, ChatCompletion), (completion_line, Completion)]
)
def test_n_of_a_batch_line_gives_numbered_choices(recipe, line, kind):
    lines = [line("a", n=4, seed=5), line("b", n=1, seed=5)]
    several, single = (
        kind.model_validate(answer["response"]["body"], strict=True)
        for answer in cbgen.run(recipe, lines)
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert len(single.choices) == 1
    assert several.choices[0] == single.choices[0]
    usage = several.usage
    assert usage.prompt_tokens == single.usage.prompt_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_n_without_sampling_is_refused_by_name(recipe):
    (answer,) = cbgen.run(recipe, [chat_line(n=2, temperature=0)])
    assert answer["response"]["status_code"] == 400
    assert answer["response"]["body"]["error"]["param"] == "n"
