from __future__ import annotations

import json
import shutil

import pytest

import cbgen
from cbgen.errors import EngineError, UsageError
from cbgen.io.inputs import Inputs
from cbgen.job.batch_job import BatchJob
from cbgen.job.report.statistics import JobStatistics
from cbgen.job.run_job import JobOptions, run_job
from cbgen.recipe.load import recipe_from_mapping


@pytest.fixture
def recipe(checkpoint):
    return {
        "model": {"path": str(checkpoint)},
        "generation_config": {"max_new_tokens": 6},
        "continuous_batching_config": {"page_size": 16, "max_batch_tokens": 64},
    }


@pytest.fixture
def answer_file(recipe, tmp_path):
    """Run a job on rows and return the output rows and the statistics."""

    def answer(rows, *, changes=(), limit=None, shard=None, **options):
        source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        statistics = JobStatistics()
        inputs = Inputs([str(source)], limit=limit, shard=shard)
        run_job(
            recipe_from_mapping(recipe, changes),
            JobOptions(inputs=inputs, output=str(output), overwrite=True, **options),
            statistics,
        )
        return [json.loads(line) for line in output.read_text().splitlines()], statistics

    return answer


ROWS = [{"id": f"r{number}", "prompt": "word " * number, "n": number} for number in range(1, 8)]


def test_rows_come_in_the_order_of_the_input(answer_file):
    rows, statistics = answer_file(ROWS)
    assert [row["id"] for row in rows] == [row["id"] for row in ROWS]
    assert [row["index"] for row in rows] == list(range(len(ROWS)))
    assert all(row["n"] == given["n"] for row, given in zip(rows, ROWS, strict=True))
    assert statistics.rows_answered == len(ROWS)
    assert statistics.completion_tokens == sum(r["usage"]["completion_tokens"] for r in rows)


def test_a_repetition_penalty_of_recipe_or_row_changes_the_answer(answer_file):
    ids = [5, 6, 5, 6, 5, 6]
    own = [{"prompt_token_ids": ids, "generation_config": {"repetition_penalty": 5.0}}]
    wanted = ["output.token_ids=true", "generation_config.max_new_tokens=12"]
    ((plain, of_row), _) = answer_file([{"prompt_token_ids": ids}, *own], changes=wanted)
    ((of_recipe,), _) = answer_file(
        [{"prompt_token_ids": ids}],
        changes=[*wanted, "generation_config.repetition_penalty=5.0"],
    )
    assert of_row["token_ids"] == of_recipe["token_ids"] != plain["token_ids"]


def test_stop_strings_of_recipe_or_row_end_the_answer_and_are_its_stop_reason(answer_file):
    longer = "generation_config.max_new_tokens=40"
    ((plain,), _) = answer_file([{"prompt": "word"}], changes=[longer])
    stop = plain["text"][9:11]
    begin = plain["text"].index(stop)
    own = {"prompt": "word", "generation_config": {"stop_strings": [stop, "not there"]}}
    ((of_row, still_plain), _) = answer_file([own, {"prompt": "word"}], changes=[longer])
    stops = f"generation_config.stop_strings={json.dumps(stop)}"
    ((of_recipe,), _) = answer_file([{"prompt": "word"}], changes=[longer, stops])
    for row in (of_row, of_recipe):
        assert row["text"] == plain["text"][:begin]
        assert (row["finish_reason"], row["stop_reason"]) == ("stop", stop)
    assert still_plain["text"] == plain["text"]


def test_order_completion_writes_the_same_rows(answer_file):
    in_order, _ = answer_file(ROWS)
    as_finished, _ = answer_file(ROWS, changes=["output.order=completion"])
    assert sorted(as_finished, key=lambda row: row["index"]) == in_order


def test_limit_takes_the_first_rows(answer_file):
    rows, _ = answer_file(ROWS, limit=3)
    assert [row["id"] for row in rows] == ["r1", "r2", "r3"]


@pytest.mark.parametrize(
    "bad", [{"nothing": 1}, {"prompt_token_ids": [99_999]}, {"id": "r1", "prompt": "again"}]
)
def test_strict_tells_a_bad_row_at_the_end_before_anything_is_generated(
    answer_file, tmp_path, bad, monkeypatch
):
    monkeypatch.setattr(BatchJob, "rows", None)  # generating would fail otherwise
    many = [{"prompt": "a"}] * 200
    with pytest.raises(UsageError, match=r"in\.jsonl:208: .*--strict"):
        answer_file([*ROWS, *many, bad], strict=True)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_row_with_its_own_settings(answer_file):
    rows = [
        {"prompt": "a", "generation_config": {"max_new_tokens": 2, "ignore_eos": True}},
        {"prompt": "a"},
    ]
    short, other = answer_file(rows)[0]
    assert short["usage"]["completion_tokens"] == 2
    assert short["finish_reason"] == "length"
    assert other["usage"]["completion_tokens"] > 2 or other["finish_reason"] == "stop"


def test_max_length_counts_prompt_and_answer(answer_file):
    rows, _ = answer_file(
        [
            {"prompt_token_ids": list(range(4, 14)), "generation_config": {"ignore_eos": True}},
            {"prompt_token_ids": list(range(4, 34))},
        ],
        changes=["generation_config.max_new_tokens=null", "generation_config.max_length=16"],
    )
    assert rows[0]["usage"] == {"prompt_tokens": 10, "completion_tokens": 6}
    assert rows[1]["error"]["code"] == "prompt_too_long"


def test_without_a_bound_the_context_is_the_bound(answer_file):
    rows, _ = answer_file(
        [{"prompt_token_ids": [5] * 200, "generation_config": {"ignore_eos": True}}],
        changes=["generation_config.max_new_tokens=null"],
    )
    assert rows[0]["usage"] == {"prompt_tokens": 200, "completion_tokens": 56}
    assert rows[0]["finish_reason"] == "length"


def test_stop_tokens_are_named_and_ends_of_sequence_are_not(answer_file):
    (free,), _ = answer_file([{"prompt": "a"}], changes=["output.token_ids=true"])
    token = free["token_ids"][2]
    change = f"generation_config.stop_token_ids=[{token}]"
    (stopped,), _ = answer_file([{"prompt": "a"}], changes=[change])
    assert stopped["finish_reason"] == "stop"
    assert stopped["stop_reason"] == token
    change = f"generation_config.eos_token_id={token}"
    (ended,), _ = answer_file([{"prompt": "a"}], changes=[change])
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", None)


def readable_pair(text: str) -> str:
    """Return two characters of a text, as late as there are two that are no broken bytes."""
    pairs = [text[place : place + 2] for place in range(len(text) - 1)]
    return [pair for pair in pairs if "\ufffd" not in pair][-1]


def test_a_row_is_cut_before_its_stop_string_and_keeps_its_tokens(answer_file):
    changes = [
        "generation_config.max_new_tokens=40",
        "continuous_batching_config.return_logprobs=true",
        "output.token_ids=true",
    ]
    given = {"prompt": "tell me", "generation_config": {"ignore_eos": True}}
    (free,), _ = answer_file([given], changes=changes)
    stop = readable_pair(free["text"])
    own = {"ignore_eos": True, "stop_strings": ["never comes", stop]}
    rows, _ = answer_file([given, given | {"generation_config": own}], changes=changes)
    assert rows[0] == free
    row = rows[1]
    begin = free["text"].index(stop)
    assert row["text"] == free["text"][:begin]
    assert (row["finish_reason"], row["stop_reason"]) == ("stop", stop)
    count = row["usage"]["completion_tokens"]
    assert row["token_ids"] == free["token_ids"][:count]
    assert row["logprobs"]["logprobs"] == free["logprobs"]["logprobs"][:count]
    assert len(row["text"]) < count < 40
    # The same for every sample, and where the recipe asks.
    changes.append(f"generation_config.stop_strings={json.dumps(stop)}")
    (again,), _ = answer_file([given], changes=changes)
    assert {**again, "index": 1} == {**row, "id": again["id"]}


def test_without_a_tokenizer_a_row_with_stop_strings_is_an_error(recipe, answer_file, tmp_path):
    folder = tmp_path / "ids_only"
    shutil.copytree(recipe["model"]["path"], folder)
    for file in folder.glob("*token*"):
        file.unlink()
    recipe["model"]["path"] = str(folder)
    asks = {"prompt_token_ids": [5, 6], "generation_config": {"stop_strings": "a"}}
    rows, statistics = answer_file([asks, {"prompt_token_ids": [5, 6]}])
    assert rows[0]["error"]["code"] == "no_tokenizer"
    assert rows[1]["finish_reason"] in ("stop", "length")
    assert statistics.rows_failed == 1


def test_logprobs_are_as_many_as_tokens(answer_file):
    changes = ["continuous_batching_config.return_logprobs=true", "output.token_ids=true"]
    (row,), _ = answer_file([{"prompt": "a"}], changes=changes)
    logprobs = row["logprobs"]
    assert logprobs["token_ids"] == row["token_ids"]
    assert len(logprobs["logprobs"]) == len(logprobs["tokens"]) == len(row["token_ids"])
    assert all(value <= 0 for value in logprobs["logprobs"])


def test_truncation_leaves_room_for_the_answer(answer_file):
    rows, _ = answer_file(
        [{"prompt_token_ids": [5] * 300, "generation_config": {"ignore_eos": True}}],
        changes=["prompt.truncation=left"],
    )
    assert rows[0]["usage"] == {"prompt_tokens": 250, "completion_tokens": 6}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a" * 99},
        {"messages": [{"role": "user", "content": "a" * 99}]},
        {"prompt_token_ids": [5] * 99},
    ],
    ids=["prompt", "messages", "prompt_token_ids"],
)
def test_prompts_of_every_form_are_cut(answer_file, row):
    changes = ["prompt.truncation=left", "prompt.max_length=8"]
    (cut,), _ = answer_file([row], changes=changes)
    assert cut["usage"]["prompt_tokens"] == 8


def test_the_context_is_not_shared_out_among_requests(answer_file):
    rows = [{"prompt_token_ids": [5] * length} for length in (2, 3, 200, 4, 5, 6, 7, 255)]
    batching = "continuous_batching_config."
    changes = [f"{batching}max_requests_per_batch=8", f"{batching}num_blocks=16"]
    answered, _ = answer_file(rows, changes=changes)
    lengths = [row["usage"]["prompt_tokens"] for row in answered]
    assert lengths == [2, 3, 200, 4, 5, 6, 7, 255]


def test_a_prompt_larger_than_the_cache_fails_alone(answer_file):
    rows = [{"prompt_token_ids": [5, 6, index + 5]} for index in range(41)]
    bad = [{"id": "large", "prompt_token_ids": [5] * 65}, {"id": "oov", "prompt_token_ids": [260]}]
    changes = ["continuous_batching_config.num_blocks=4"]
    answered, _ = answer_file([*rows[:20], *bad, *rows[20:]], changes=changes)
    codes = {row["id"]: row["error"]["code"] for row in answered if row["error"]}
    assert codes == {"large": "prompt_exceeds_cache", "oov": "token_out_of_vocabulary"}
    alone, _ = answer_file(rows, changes=changes)
    texts = [row["text"] for row in answered if row["error"] is None]
    assert texts == [row["text"] for row in alone]


def test_a_repeated_id_gets_a_suffix_where_asked(answer_file):
    rows = [{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}]
    answered, _ = answer_file(rows, changes=["output.on_duplicate_id=suffix"])
    assert [row["id"] for row in answered] == ["a", "a-2"]


def test_a_failing_engine_keeps_what_was_finished(answer_file, tmp_path, monkeypatch):
    from cbgen.engine.runner import Runner

    launch = Runner.launch

    def fail_late(self, batch):
        if batch.step > 12:
            raise MemoryError("no memory for step 13")
        return launch(self, batch)

    monkeypatch.setattr(Runner, "launch", fail_late)
    rows = [{"prompt": "a"}, *({"prompt": "b", "generation_config": {"max_new_tokens": 40}},) * 2]
    with pytest.raises(EngineError, match="no memory for step 13"):
        answer_file(rows, changes=["generation_config.ignore_eos=true"])
    (kept,) = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(kept)["index"] == 0


def test_run_yields_what_the_file_would_hold(answer_file, recipe):
    in_file, _ = answer_file(ROWS)
    assert list(cbgen.run(recipe, ROWS)) == in_file
    as_finished = list(cbgen.run(recipe, ROWS, order="completion"))
    assert sorted(as_finished, key=lambda row: row["index"]) == in_file


def test_run_takes_rows_lazily(recipe):
    def rows():
        yield {"prompt": "a"}
        yield {"nothing": 1}

    answered, failed = cbgen.run(recipe, rows())
    assert answered["error"] is None
    assert failed["error"]["code"] == "no_prompt"


def test_a_run_that_is_dropped_ends_its_threads(recipe):
    from tests.helpers.jobs import job_threads

    rows = cbgen.run(recipe, ({"prompt": "a"} for _ in range(10_000)))
    next(rows)
    assert "cbgen-engine" in job_threads()
    rows.close()
    assert "cbgen-engine" not in job_threads()


def test_a_model_that_is_not_there_is_named(recipe):
    recipe["model"]["path"] = "/nowhere/model"
    with pytest.raises(UsageError, match="/nowhere/model"):
        list(cbgen.run(recipe, []))
