"""cbgen.Engine: rows to rows with a model that is loaded once."""

from __future__ import annotations

import pytest

import cbgen
from cbgen.job import run_rows


@pytest.fixture
def recipe(checkpoint):
    return {
        "model": {"path": str(checkpoint)},
        "prompt": {"chat": False},
        "generation_config": {"max_new_tokens": 4},
        "continuous_batching_config": {"page_size": 16, "num_blocks": 64},
    }


ROWS = [{"prompt": "one"}, {"prompt": "two", "id": "b"}, {"no": "prompt"}]


def test_rows_are_those_of_run(recipe):
    with cbgen.Engine(recipe) as engine:
        rows = list(engine.run(ROWS))
    assert rows == list(cbgen.run(recipe, ROWS))
    assert [row["error"] is None for row in rows] == [True, True, False]


def test_the_model_is_loaded_once_for_all_runs(recipe, monkeypatch):
    loads = []
    load_model = run_rows.load_model
    monkeypatch.setattr(
        run_rows, "load_model", lambda config: loads.append(1) or load_model(config)
    )
    with cbgen.Engine(recipe) as engine:
        assert list(engine.run(ROWS)) == list(engine.run(ROWS))
    assert loads == [1]


def test_a_run_that_is_left_early_leaves_the_engine_usable(recipe):
    with cbgen.Engine(recipe) as engine:
        first = next(iter(engine.run({"prompt": "one"} for _ in range(1000))))
        assert next(iter(engine.run(ROWS)))["text"] == first["text"]


def test_a_queue_bound_changes_no_row(recipe):
    rows = [{"prompt": f"row {number}"} for number in range(30)]
    bounded = dict(recipe["continuous_batching_config"], max_queue_size=1, max_requests_per_batch=2)
    assert list(cbgen.run(recipe | {"continuous_batching_config": bounded}, rows)) == list(
        cbgen.run(recipe, rows)
    )


@pytest.mark.parametrize("order", ["input", "completion"])
def test_what_the_rows_raise_comes_behind_the_answers_of_those_before(recipe, order):
    def rows():
        for number in range(5):
            yield {"prompt": f"row {number}"}
        raise LookupError("no more rows")

    answers = cbgen.run(recipe, rows(), order=order)
    taken = [next(answers) for _ in range(5)]
    assert {row["index"] for row in taken} == set(range(5))
    with pytest.raises(LookupError, match="no more rows"):
        next(answers)


def test_a_closed_engine_raises(recipe):
    engine = cbgen.Engine(recipe)
    engine.close()
    with pytest.raises(cbgen.UsageError, match="closed"):
        engine.run(ROWS)


def test_a_wrong_recipe_is_refused_before_anything_is_loaded():
    with pytest.raises(cbgen.UsageError, match="path"):
        cbgen.Engine({"model": {"path": ""}})
