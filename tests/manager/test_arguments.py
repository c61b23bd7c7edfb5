"""Arguments of other kinds: taken where the meaning is plain, else refused with a remedy."""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BatchEncoding, GenerationConfig, LlamaModel
from transformers.generation import ContinuousBatchingConfig as TransformersBatchingConfig

import cbgen
from tests.helpers.managers import PATIENCE
from tests.helpers.models import tiny_config, tiny_model, tiny_reference

PROMPT = (3, 1, 4, 1, 5)
GREEDY = {"max_new_tokens": 4}


def answer(inputs, config=GREEDY, **options) -> list[list[int]]:
    outputs = cbgen.generate_batch(tiny_model("llama"), inputs, config, **options)
    return [output.generated_tokens for output in outputs.values()]


EXPECTED = functools.partial(tiny_reference, "llama", PROMPT, 4)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gpt2", r"got str 'gpt2'; load it with AutoModelForCausalLM\.from_pretrained\('gpt2'\)"),
        ([[1, 2]], "got list; the model comes first"),
        (torch.nn.Linear(2, 2), "must be one of transformers, got Linear"),
        (LlamaModel(tiny_config("llama")), "LlamaModel has none; load it with AutoModelForCausal"),
    ],
)
@pytest.mark.parametrize("call", [cbgen.generate_batch, cbgen.init_continuous_batching])
def test_what_is_no_language_model_is_refused(call, model, words):
    arguments = ([[1]],) if call is cbgen.generate_batch else ()
    with pytest.raises(cbgen.UsageError, match=words):
        call(model, *arguments)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (None, "inputs must be a list of prompts, .* got NoneType"),
        ("text", "inputs must be a list of prompts, .* got str"),
        ({"input_ids": [1, 2], "attention_mask": [1, 1]}, r"for one prompt give \[inputs\]"),
        ({"input_ids": [[1], [2]], "attention_mask": [[1]]}, "2 rows of input_ids and 1 of"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "2 tokens and attention_mask 1"),
        (list(PROMPT), r"one flat list; for a single prompt give \[input_ids\]"),
        (torch.tensor(PROMPT), r"one flat Tensor of shape \[5\]; for a single prompt"),
        (
            [PROMPT, "text"],
            r"inputs\[1\]: input_ids must be a flat list .* got str.*tokenizer\(text",
        ),
        ([torch.ones(2, 3).long()], r"inputs\[0\]: .* got Tensor of shape \[2, 3\]"),
        ([[0.5]], "'float' object cannot be interpreted as an integer"),
        ({"ids": [PROMPT]}, "must have input_ids, as those of tokenizers do; it has ids"),
        ([{}], r"inputs\[0\]: a mapping must have input_ids.* it has nothing"),
    ],
)
def test_what_are_no_prompts_is_refused_with_the_place(inputs, words):
    with pytest.raises(TypeError, match=words):
        answer(inputs)


@pytest.mark.parametrize(
    "inputs",
    [
        torch.tensor([PROMPT, PROMPT]),
        np.array([PROMPT, PROMPT]),
        [torch.tensor([PROMPT]), [PROMPT]],
        {"input_ids": [PROMPT, PROMPT]},
        BatchEncoding({"input_ids": torch.tensor([PROMPT, PROMPT])}),
        [BatchEncoding({"input_ids": PROMPT, "attention_mask": [1] * 5})] * 2,
        (prompt for prompt in (PROMPT, PROMPT)),
    ],
)
def test_prompts_may_come_in_the_forms_of_tensors_and_tokenizers(inputs):
    assert answer(inputs) == [EXPECTED()] * 2


@pytest.mark.parametrize("make", [list, torch.tensor])
def test_tokens_that_an_attention_mask_hides_are_left_out(make):
    encoding = {
        "input_ids": make([[0, 0, *PROMPT], [*PROMPT, 0, 0]]),
        "attention_mask": make([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]]),
    }
    assert answer(encoding) == [EXPECTED()] * 2


def test_a_single_prompt_may_come_from_a_tokenizer(scripted, checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    manager = scripted()
    for options in ({}, {"return_tensors": "pt"}):
        manager.add_request(tokenizer("hi", **options), request_id="a", max_new_tokens=1)
        output = manager.get_result("a", timeout=PATIENCE)
        assert output.prompt_ids == tokenizer("hi")["input_ids"]


def test_several_prompts_are_no_single_one(scripted):
    with pytest.raises(TypeError, match="flat list of token ids, got list"):
        scripted().add_request([[1], [2]])


def test_a_generation_config_may_be_a_mapping():
    assert answer([PROMPT], {"max_new_tokens": 2, "transformers_version": "5"}) == [EXPECTED()[:2]]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (5, "generation_config must be a GenerationConfig or a mapping .* got int 5"),
        (TransformersBatchingConfig(), "mapping of its fields, got ContinuousBatchingConfig"),
        ({"max_new_token": 2}, "generation_config: max_new_token is not .*mean max_new_tokens"),
        ({"temperature": "hot"}, "generation_config: temperature: expected a number"),
    ],
)
def test_what_is_no_generation_config_is_refused(config, words):
    with pytest.raises(cbgen.UsageError, match=words):
        answer([PROMPT], config)


def test_a_batching_config_in_a_mapping_of_generation_settings_counts():
    config = GREEDY | {"continuous_batching_config": {"return_logprobs": True}}
    with pytest.warns(FutureWarning):
        output = cbgen.generate_batch(tiny_model("llama"), [PROMPT], config)["req_0"]
    assert len(output.logprobs) == 4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"return_logprobs": "yes"}, 'return_logprobs: expected true or false, got "yes"'),
        (cbgen.ContinuousBatchingConfig(return_logprobs="yes"), "return_logprobs: expected true"),
        (TransformersBatchingConfig(page_size="16"), 'page_size: expected an integer, got "16"'),
        ({"seed": -1}, "seed must be at least 0.* got -1"),
        ({"seed": 2**63}, "seed must be at least 0"),
        (3, "must be a ContinuousBatchingConfig or a mapping, got int 3"),
    ],
)
def test_a_batching_config_of_wrong_values_is_refused(settings, words):
    with pytest.raises(cbgen.UsageError, match=words):
        answer([PROMPT], continuous_batching_config=settings)


@pytest.mark.parametrize("hints", [{"num_requests": 3}, 5])
def test_what_are_no_workload_hints_is_refused(hints):
    with pytest.raises(cbgen.UsageError, match="workload_hints must be a WorkloadHints, got"):
        cbgen.init_continuous_batching(tiny_model("llama"), workload_hints=hints)


def test_an_unknown_kind_of_logprobs_is_refused():
    with pytest.raises(cbgen.UsageError, match="logprobs_mode must be raw or processed, got 'all'"):
        answer([PROMPT], logprobs_mode="all")


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (GREEDY, {"num_return_sequences": 3}),
        (GREEDY | {"num_return_sequences": 3, "do_sample": True}, {"temperature": 0}),
    ],
)
def test_keywords_that_contradict_the_config_are_refused_at_the_call(config, options):
    with pytest.raises(cbgen.UsageError, match="generate_batch: num_return_sequences = 3 asks for"):
        answer([PROMPT], config, **options)


@pytest.mark.parametrize("wrong", [7, True, b"a"])
def test_ids_of_requests_are_text(scripted, wrong):
    manager = scripted()
    calls = [
        lambda: manager.add_request([1], request_id=wrong),
        lambda: manager.add_requests([[1]], request_ids=[wrong]),
        lambda: manager.cancel_request(wrong),
        lambda: manager.get_result(wrong),
        lambda: manager.request_id_iter(wrong),
        lambda: manager.request_id_aiter(wrong),
        lambda: manager.as_completed([wrong]),
        lambda: manager.register_result_handler(wrong, print),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"request ids are text, got .*; give str\(...\) of it"):
            call()


def test_one_id_is_no_list_of_ids(scripted):
    with pytest.raises(TypeError, match=r"several ids; give \['req_0'\]"):
        scripted().as_completed("req_0")


@pytest.mark.parametrize("name", ["request_ids", "generation_configs"])
def test_lists_that_are_empty_are_not_taken_for_none(scripted, name):
    with pytest.raises(ValueError, match=f"0 {name} were given for 2 inputs; give one for each"):
        scripted().add_requests([[1], [2]], **{name: []})


@pytest.mark.parametrize("given", ["ab", {"max_new_tokens": 1}, 5])
def test_one_value_is_no_list_of_values(scripted, given):
    with pytest.raises(TypeError, match="generation_configs must be a list of 2, one for each"):
        scripted().add_requests([[1], [2]], generation_configs=given)


def test_requests_of_one_call_may_have_generation_configs_of_their_own(scripted):
    manager = scripted()
    ids = manager.add_requests(
        [[3], [3]],
        max_new_tokens=3,
        generation_configs=[GenerationConfig(max_new_tokens=1), GenerationConfig()],
    )
    results = {result.request_id: result.generated_tokens for result in manager}
    assert [results[name] for name in ids] == [[4], [4, 5, 6]]


def test_what_is_no_generation_config_of_a_request_is_refused_with_its_place(scripted):
    with pytest.raises(cbgen.UsageError, match=r"generation_configs\[1\] must be .* got int 5"):
        scripted().add_requests([[1], [2]], generation_configs=[None, 5])


class AsyncHandler:
    async def __call__(self, output) -> None:
        """Do nothing."""


async def handle(output, more=None) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    "callback", [handle, functools.partial(handle, more=1), AsyncHandler(), AsyncHandler().__call__]
)
def test_a_result_handler_that_is_async_is_refused(scripted, callback):
    manager = scripted()

    async def register() -> None:
        manager.register_result_handler("a", callback)

    with pytest.raises(TypeError, match=r"plain function.*create_task.* or use request_id_aiter"):
        asyncio.run(register())


def test_a_result_handler_is_a_function(scripted):
    with pytest.raises(TypeError, match="the callback must be a function, got NoneType"):
        scripted().register_result_handler("a", None)


def test_a_tokenizer_that_is_not_loaded_is_refused_at_once():
    message = "the tokenizer must be a loaded one, got str 'org/name'; load it with"
    with pytest.raises(cbgen.UsageError, match=message):
        cbgen.init_continuous_batching(tiny_model("llama"), tokenizer="org/name")
