from __future__ import annotations

import math

import pytest

from cbgen.errors import RowError
from cbgen.io.dialects import read_outcome, with_dialect
from cbgen.io.ids import IdIndex
from cbgen.io.json_values import encode_row
from cbgen.io.openai.body_fields import BodyError
from cbgen.io.openai.responses import CANCELLED, BatchLines
from cbgen.io.rows import Answer, Sample, logprobs_object
from tests.helpers.batch_files import chat_line, completion_line, line_record
from tests.helpers.records import error_of, read_bytes

LINES = BatchLines(seed=0, model="org/model", token_ids=False)
DIALECTS = ["openai", "vllm"]
SO = Sample(text="So.", finish_reason="stop", stop_reason=9, generated_tokens=[8, 9])
OR = Sample(text="Or", finish_reason="length", generated_tokens=[7])
ANSWER = Answer([1, 2, 3], [SO])
SAMPLES = Answer([1, 2, 3], [SO, OR])
REFUSAL = BodyError("unsupported_value", "n = 2 is not supported", param="n")


def answered(columns, dialect="openai", answer=ANSWER, **changes):
    return LINES.answer(line_record(columns, dialect, **changes), answer)


def body_of(*arguments, **options):
    return answered(*arguments, **options)["response"]["body"]


def failed(error, dialect="openai", columns=None):
    record = line_record(chat_line() if columns is None else columns, dialect)
    return LINES.failure(record, error)


def never_ran(dialect):
    (record,) = read_bytes(b"nonsense")
    return LINES.failure(with_dialect(record, dialect), error_of(record))


def with_logprobs(*logprobs):
    sample = Sample(
        text="ab",
        finish_reason="length",
        generated_tokens=[5, 6],
        logprobs=logprobs_object(tokens=["a", "é"], token_ids=[5, 6], logprobs=logprobs),
    )
    return Answer([1], [sample])


def test_a_chat_completion_in_the_form_of_openai():
    digest = LINES.digest(line_record(chat_line("q1"), index=10))
    assert answered(chat_line("q1"), index=10) == {
        "id": f"batch_req_a_{digest[:16]}",
        "custom_id": "q1",
        "response": {
            "status_code": 200,
            "request_id": f"req_{digest}",
            "body": {
                "id": f"chatcmpl-{digest}",
                "object": "chat.completion",
                "created": 0,
                "model": "m",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "So.", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
                "system_fingerprint": None,
            },
        },
        "error": None,
    }


def test_a_chat_completion_in_the_form_of_vllm():
    line = answered(chat_line("q1"), "vllm", index=10)
    digest = LINES.digest(line_record(chat_line("q1"), index=10))
    assert encode_row(line).decode() == (
        '{"id":"vllm-a-' + digest[:16] + '","custom_id":"q1","response":{"status_code":200,'
        '"request_id":"vllm-batch-' + digest + '","body":{"id":"chatcmpl-' + digest + '",'
        '"object":"chat.completion","created":0,"model":"m","choices":[{"index":0,"message":'
        '{"role":"assistant","content":"So.","refusal":null,"annotations":null,"audio":null,'
        '"function_call":null,"reasoning":null},"logprobs":null,"finish_reason":"stop",'
        '"stop_reason":9,"token_ids":null,"routed_experts":null,"weight_versions":null}],'
        '"service_tier":null,"system_fingerprint":null,"usage":{"prompt_tokens":3,'
        '"total_tokens":5,"completion_tokens":2,"prompt_tokens_details":null,'
        '"completion_tokens_details":null},"prompt_logprobs":null,"prompt_token_ids":null,'
        '"prompt_text":null,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}},'
        '"error":null}\n'
    )


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_completion_has_text(dialect):
    body = body_of(completion_line(), dialect)
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"][0]["text"] == "So."


@pytest.mark.parametrize("prompt", ["Why? ", ["Why? "]])
def test_an_echo_puts_the_prompt_before_the_answer(prompt):
    assert body_of(completion_line(prompt=prompt, echo=True))["choices"][0]["text"] == "Why? So."


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_body_without_a_model_gets_the_recipes(dialect):
    assert body_of(chat_line(model=None), dialect)["model"] == "org/model"


def test_a_request_id_of_the_body_names_the_completion():
    assert body_of(chat_line(request_id="r7"), "vllm")["id"] == "chatcmpl-r7"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_token_ids_are_written_where_they_are_asked_for(dialect):
    chat = body_of(chat_line(return_token_ids=True), dialect)
    assert (chat["prompt_token_ids"], chat["choices"][0]["token_ids"]) == ([1, 2, 3], [8, 9])
    (choice,) = body_of(completion_line(return_token_ids=True), dialect)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([1, 2, 3], [8, 9])


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("line", [chat_line(n=2), completion_line(n=2)], ids=["chat", "text"])
def test_samples_are_numbered_choices_whose_prompt_counts_once(dialect, line):
    body = body_of(line, dialect, answer=SAMPLES)
    choices = body["choices"]
    texts = [choice.get("text") or choice["message"]["content"] for choice in choices]
    assert texts == ["So.", "Or"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]
    usage = {name: body["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")}
    assert usage == {"prompt": 3, "completion": 3, "total": 6}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_sample_has_its_token_ids(dialect):
    body = body_of(completion_line(n=2, return_token_ids=True), dialect, answer=SAMPLES)
    assert [choice["token_ids"] for choice in body["choices"]] == [[8, 9], [7]]
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [[1, 2, 3]] * 2


def test_an_echo_begins_every_sample():
    body = body_of(completion_line(prompt="Why? ", echo=True, n=2), answer=SAMPLES)
    assert [choice["text"] for choice in body["choices"]] == ["Why? So.", "Why? Or"]


def test_settings_that_contradict_each_other_are_the_fault_of_n():
    error = RowError("invalid_generation_config", "greedy", type="invalid_request")
    assert failed(error)["response"]["body"]["error"]["param"] == "n"
    assert failed(error, "vllm")["error"]["error"]["param"] == "n"


def test_log_probabilities_of_a_chat_completion():
    (choice,) = body_of(chat_line(logprobs=True), answer=with_logprobs(-0.5, -math.inf))["choices"]
    assert choice["logprobs"] == {
        "content": [
            {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []},
            {"token": "é", "logprob": -9999.0, "bytes": [195, 169], "top_logprobs": []},
        ]
    }


def test_log_probabilities_of_a_completion():
    (choice,) = body_of(completion_line(logprobs=0), answer=with_logprobs(-0.5, -2.0))["choices"]
    assert choice["logprobs"] == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -2.0],
        "tokens": ["a", "é"],
        "top_logprobs": [{"a": -0.5}, {"é": -2.0}],
    }


def test_tokens_may_be_shown_as_their_ids():
    line = chat_line(logprobs=True, return_tokens_as_token_ids=True)
    content = body_of(line, answer=with_logprobs(-1.0, -2.0))["choices"][0]["logprobs"]["content"]
    assert [item["token"] for item in content] == ["token_id:5", "token_id:6"]


def test_a_refusal_is_a_response_of_openai():
    line = failed(REFUSAL)
    assert line["error"] is None
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"] == {
        "error": {
            "message": "n = 2 is not supported",
            "type": "invalid_request_error",
            "param": "n",
            "code": "unsupported_value",
        }
    }


def test_a_refusal_of_vllm_has_no_body():
    line = failed(REFUSAL, "vllm")
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"] is None
    assert line["error"] == {
        "error": {
            "message": "n = 2 is not supported",
            "type": "BadRequestError",
            "param": "n",
            "code": 400,
        }
    }


@pytest.mark.parametrize("param", ["url", "stream"])
def test_vllm_writes_some_refusals_as_a_string(param):
    line = failed(BodyError("invalid_url", "no such url", param=param), "vllm")
    assert (line["response"]["status_code"], line["error"]) == (400, "no such url")


def test_a_line_that_never_ran_has_no_response_of_openai():
    line = never_ran("openai")
    assert (line["custom_id"], line["response"]) == (None, None)
    assert line["error"]["code"] == "invalid_json_line"
    assert line["error"]["message"].startswith("in.jsonl:1: not JSON")


def test_a_line_that_never_ran_is_a_refusal_of_vllm():
    line = never_ran("vllm")
    assert line["response"] | {"request_id": ""} == {
        "status_code": 400,
        "request_id": "",
        "body": None,
    }
    assert line["error"]["error"]["type"] == "BadRequestError"


def test_a_custom_id_that_is_no_string_is_given_back():
    record = line_record(chat_line(7))
    assert LINES.failure(record, record.error)["custom_id"] == 7


def test_a_custom_id_with_a_suffix_is_answered_under_it():
    ids = IdIndex("suffix")
    ids.admit(line_record(chat_line("a")))
    record = ids.admit(line_record(chat_line("a"), index=1, line=2))
    assert LINES.answer(record, ANSWER)["custom_id"] == "a-2"


@pytest.mark.parametrize(
    ("line", "param"), [(chat_line(), "messages"), (completion_line(), "prompt")]
)
def test_a_prompt_that_is_too_long_is_the_prompts_fault(line, param):
    error = RowError("prompt_too_long", "300 tokens", type="invalid_request")
    details = failed(error, columns=line)["response"]["body"]["error"]
    assert (details["code"], details["param"]) == ("context_length_exceeded", param)


def test_a_failure_of_the_engine_is_no_fault_of_the_request():
    error = RowError("engine_error", "lost", type="engine_error")
    assert failed(error)["response"]["status_code"] == 500
    assert failed(error)["response"]["body"]["error"]["type"] == "server_error"
    assert failed(error, "vllm")["error"]["error"]["type"] == "InternalServerError"


def test_a_request_that_the_end_of_the_run_cut_short_never_ran():
    line = failed(RowError(CANCELLED, "the run ended", type="engine_error"))
    assert line["response"] is None
    assert line["error"]["code"] == "batch_cancelled"


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("index", [0, 9, 10, 2**40])
def test_the_index_of_a_line_stands_in_its_id(dialect, index):
    line = answered(chat_line(), dialect, index=index)
    outcome = read_outcome(encode_row(line))
    assert (outcome.index, outcome.finish_reasons, outcome.completion_tokens) == (
        index,
        ("stop",),
        2,
    )


def test_ids_are_functions_of_seed_index_and_custom_id():
    record = line_record(chat_line("a"), index=1)
    again = BatchLines(seed=0, model="other", token_ids=True).digest(record)
    others = {
        BatchLines(seed=1, model="", token_ids=False).digest(record),
        LINES.digest(line_record(chat_line("b"), index=1)),
        LINES.digest(line_record(chat_line("a"), index=2)),
    }
    assert LINES.digest(record) == again
    assert len(others | {again}) == 4


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_refusal_is_read_back_as_a_failed_row(dialect):
    outcome = read_outcome(encode_row(failed(REFUSAL, dialect)))
    assert (outcome.index, outcome.finish_reasons) == (0, ("error",))
    assert outcome.error_code is not None
