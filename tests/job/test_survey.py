"""What `cbgen plan` counts of an input."""

from __future__ import annotations

from collections import Counter

import pytest

from cbgen.io.inputs import Inputs
from cbgen.job.dry_run import JobPlan, length_statistics, plan_job
from cbgen.recipe.load import recipe_from_mapping
from tests.helpers.commands import jsonl
from tests.helpers.tiny_checkpoint import CONTEXT, VOCAB_SIZE


@pytest.fixture
def plan(checkpoint, tmp_path):
    """Plan a run over rows of the tiny model, with changes to its recipe."""

    def make(rows=None, *changes: str) -> JobPlan:
        recipe = {
            "model": {"path": str(checkpoint)},
            "prompt": {"chat": False},
            "generation_config": {"max_new_tokens": 8},
            "continuous_batching_config": {"page_size": 16, "max_batch_tokens": 64},
        }
        inputs = None
        if rows is not None:
            source = tmp_path / "in.jsonl"
            source.write_bytes(jsonl(*rows))
            inputs = Inputs([str(source)])
        return plan_job(recipe_from_mapping(recipe, changes), inputs)

    return make


def token_row(length: int, **columns) -> dict:
    return {"prompt_token_ids": [5] * length, **columns}


def test_bad_rows_are_those_that_the_run_would_fail(plan):
    rows = [
        {"prompt": "good"},
        b"not JSON",
        {"nothing": 1},
        token_row(CONTEXT),
        {"prompt_token_ids": [VOCAB_SIZE]},
        {"prompt": "x", "generation_config": {"temperature": -1}},
    ]
    planned = plan(rows)
    bad = planned.summary["bad_rows"]
    assert planned.summary["rows"] == 6
    assert planned.num_bad_rows == bad["count"] == 5
    assert bad["codes"] == {
        "invalid_json": 1,
        "no_prompt": 1,
        "prompt_too_long": 1,
        "token_out_of_vocabulary": 1,
        "invalid_generation_config": 1,
    }
    assert [item["place"].rpartition(":")[2] for item in bad["first"]] == ["2", "3", "4", "5", "6"]


def test_the_first_bad_rows_alone_are_shown(plan):
    planned = plan([{"nothing": 1}] * 30)
    assert planned.num_bad_rows == 30
    assert len(planned.summary["bad_rows"]["first"]) == 10


@pytest.mark.parametrize(("mode", "num_bad"), [("error", 2), ("suffix", 0)])
def test_repeated_ids_are_counted_whatever_becomes_of_them(plan, mode, num_bad):
    rows = [{"id": "a", "prompt": "x"}] * 3
    planned = plan(rows, f"output.on_duplicate_id={mode}")
    assert planned.summary["duplicate_ids"] == 2
    assert planned.num_bad_rows == num_bad


def test_tokens_are_those_of_rendered_prompts(plan):
    row = {"messages": [{"role": "user", "content": "abc"}]}
    lengths = plan([row]).summary["prompt_tokens"]
    assert lengths["total"] == len(["<|user|>", "a", "b", "c", "</s>", "<|assistant|>"])


def test_answers_are_bounded_by_rows_and_context(plan):
    rows = [
        token_row(10),
        token_row(10, generation_config={"max_new_tokens": 3}),
        token_row(CONTEXT - 2),
    ]
    estimate = plan(rows).summary["estimate"]
    assert estimate["prompt_tokens"] == 20 + CONTEXT - 2
    assert estimate["completion_tokens"] == 8 + 3 + 2


def test_every_sample_of_a_row_has_an_answer_and_the_row_one_prompt(plan):
    config = {"num_return_sequences": 3, "max_new_tokens": 4, "temperature": 1}
    planned = plan([token_row(10, generation_config=config), token_row(10)])
    assert planned.summary["prompt_tokens"]["total"] == 20
    assert planned.summary["estimate"]["completion_tokens"] == 3 * 4 + 8


def test_requests_at_once_follow_from_blocks(plan):
    planned = plan(
        [token_row(9), token_row(41)],
        "continuous_batching_config.num_blocks=32",
        "continuous_batching_config.max_requests_per_batch=20",
    )
    # 9 + 8 - 1 stored tokens take one block, 41 + 8 - 1 take three, a full context takes 16.
    assert planned.summary["requests_at_once"] == {
        "at_most": 20,
        "of_full_context": 2,
        "of_average_length": 16,
        "of_longest": 10,
    }


def test_rows_that_the_cache_may_be_too_small_for_are_counted(plan):
    rows = [token_row(20), token_row(40)]
    planned = plan(rows, "continuous_batching_config.num_blocks=3")
    assert planned.summary["may_outgrow_cache"] == 0
    planned = plan(
        rows, "continuous_batching_config.num_blocks=3", "generation_config.max_new_tokens=20"
    )
    assert planned.summary["may_outgrow_cache"] == 1


def test_without_rows_the_engine_alone_is_planned(plan):
    summary = plan().summary
    assert summary["rows"] is None
    assert summary["estimate"] is None
    assert summary["cache"]["page_size"] == 16
    assert summary["decisions"]["continuous_batching_config.page_size"]["value"] == 16


def test_an_empty_input_is_planned(plan):
    summary = plan([]).summary
    assert (summary["rows"], summary["prompt_tokens"]) == (0, None)
    assert summary["estimate"] == {"prompt_tokens": 0, "completion_tokens": 0, "steps": 0}


def test_lengths_are_summed_up():
    lengths = Counter({1: 5, 2: 4, 10: 1})
    assert length_statistics(lengths) == {
        "total": 23,
        "min": 1,
        "median": 1,
        "p90": 2,
        "max": 10,
        "histogram": [
            {"from": number, "to": number, "rows": lengths[number]} for number in range(1, 11)
        ],
    }
    assert length_statistics(Counter()) is None


@pytest.mark.parametrize("lengths", [[5], [33, 40, 63], [1, 1000], [990, 1024], [17, 271], [1, 16]])
def test_every_length_is_in_its_bucket(lengths):
    statistics = length_statistics(Counter(lengths))
    assert statistics is not None
    buckets = statistics["histogram"]
    for bucket in buckets:
        inside = [length for length in lengths if bucket["from"] <= length <= bucket["to"]]
        assert len(inside) == bucket["rows"]
    assert sum(bucket["rows"] for bucket in buckets) == len(lengths)
    ends = [bucket["to"] for bucket in buckets]
    assert [bucket["from"] for bucket in buckets[1:]] == [end + 1 for end in ends[:-1]]
    assert len(buckets) <= 12
