"""The engine step by step, over a model with chosen logits."""

from __future__ import annotations

import pytest

from cbgen.engine.request import FinishReason, RequestStatus
from cbgen.engine.step import ScheduledBatch
from tests.helpers.engine import make_request, run_engine, tokens_of
from tests.helpers.scripted import ScriptedModel, make_scripted_engine


def test_the_chosen_tokens_are_generated():
    request = make_request("a", [3], max_new_tokens=4)
    assert tokens_of(run_engine(make_scripted_engine(ScriptedModel()), [request])) == {
        "a": [4, 5, 6, 7]
    }


def test_logits_may_depend_on_the_position():
    model = ScriptedModel(lambda token_id, position: {position % 3: 5.0})
    request = make_request("a", [9, 9], max_new_tokens=5)
    outputs = run_engine(make_scripted_engine(model), [request])
    assert outputs["a"].generated_tokens == [1, 2, 0, 1, 2]


def test_a_step_without_requests_runs_nothing():
    model = ScriptedModel()
    engine = make_scripted_engine(model)
    assert engine.step() == []
    assert model.num_steps == 0


def test_a_refused_request_comes_back_from_the_next_step():
    engine = make_scripted_engine(ScriptedModel())
    engine.add(make_request("a", []))
    assert not engine.has_unfinished()
    (output,) = engine.step()
    assert output.status is RequestStatus.FAILED
    assert output.error_code == "empty_prompt"


def test_a_cancelled_request_comes_back_from_the_next_step():
    engine = make_scripted_engine(ScriptedModel())
    engine.add(make_request("a", [3]))
    engine.step()
    engine.step()
    engine.cancel("a")
    (output,) = engine.step()
    assert output.status is RequestStatus.CANCELLED
    assert output.generated_tokens == [4, 5]


def test_unfinished_requests_are_listed():
    engine = make_scripted_engine(ScriptedModel())
    engine.add(make_request("a", [3], max_new_tokens=1))
    engine.add(make_request("b", [3]))
    engine.step()
    assert [request.request_id for request in engine.unfinished()] == ["b"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_end_their_request_alone(temperature):
    nan = float("nan")
    model = ScriptedModel(
        lambda token_id, position: {token_id + 1: nan if token_id == 12 else 50.0}
    )
    requests = [
        make_request("good", [3], max_new_tokens=5, temperature=temperature),
        make_request("bad", [10], max_new_tokens=5, temperature=temperature),
    ]
    outputs = run_engine(make_scripted_engine(model), requests)
    assert outputs["good"].generated_tokens == [4, 5, 6, 7, 8]
    assert outputs["bad"].error_code == "non_finite_logits"
    assert outputs["bad"].generated_tokens == [11, 12]


def test_the_output_of_a_failed_request_keeps_no_token_of_the_failed_step():
    model = ScriptedModel(lambda token_id, position: {0: float("inf")})
    outputs = run_engine(
        make_scripted_engine(model), [make_request("a", [3], logprobs="raw", max_new_tokens=2)]
    )
    assert (outputs["a"].generated_tokens, outputs["a"].logprobs) == ([], [])


def test_a_stop_token_ends_a_request_while_others_go_on():
    requests = [
        make_request("stops", [3], stop_token_ids=frozenset({6})),
        make_request("goes on", [3], max_new_tokens=6),
    ]
    outputs = run_engine(make_scripted_engine(ScriptedModel()), requests)
    assert outputs["stops"].generated_tokens == [4, 5, 6]
    assert outputs["stops"].finish_reason is FinishReason.STOP
    assert outputs["goes on"].generated_tokens == [4, 5, 6, 7, 8, 9]


def test_no_forward_pass_is_larger_than_the_budget():
    model = ScriptedModel()
    engine = make_scripted_engine(model, max_batch_tokens=8, max_requests=4)
    run_engine(engine, [make_request(str(i), [i] * 20, max_new_tokens=3) for i in range(6)])
    assert max(model.tokens_per_step) == 8


def test_the_last_token_of_an_answer_is_never_run():
    model = ScriptedModel()
    run_engine(make_scripted_engine(model), [make_request("a", [1] * 5, max_new_tokens=4)])
    assert sum(model.tokens_per_step) == 5 + 3


def test_many_more_requests_than_rows_all_end():
    engine = make_scripted_engine(ScriptedModel(), num_blocks=12, max_requests=3)
    requests = [make_request(str(i), [i % 20], max_new_tokens=1 + i % 9) for i in range(60)]
    outputs = run_engine(engine, requests)
    assert all(len(outputs[str(i)].generated_tokens) == 1 + i % 9 for i in range(60))
    assert engine.stats().num_used_blocks == 0


def test_a_batch_without_requests_runs_nothing():
    model = ScriptedModel()
    assert make_scripted_engine(model)._runner.launch(ScheduledBatch(step=1)).result().samples == ()
    assert model.num_steps == 0


def test_bookkeeping_is_verified_after_every_step_when_asked(monkeypatch):
    monkeypatch.setenv("CBGEN_CHECK", "1")
    engine = make_scripted_engine(ScriptedModel())
    engine.add(make_request("a", [3]))
    engine.step()
    engine._scheduler._free_rows.pop()
    with pytest.raises(AssertionError, match="rows are lost"):
        engine.step()


def test_bookkeeping_is_not_verified_otherwise(monkeypatch):
    monkeypatch.delenv("CBGEN_CHECK")
    engine = make_scripted_engine(ScriptedModel())
    engine.add(make_request("a", [3]))
    engine.step()
    engine._scheduler._free_rows.pop()
    engine.step()
