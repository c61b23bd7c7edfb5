"""Streams: cumulative outputs, deltas of tokens and text, and what an asyncio program sees."""

from __future__ import annotations

import asyncio
import copy
import pickle
import sys
import threading

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

import cbgen
from cbgen.engine.request import GenerationOutput, RequestStatus
from tests.helpers.managers import PATIENCE, Gate, failing_at, run_threads
from tests.helpers.models import VOCAB_SIZE, tiny_model, tiny_reference
from tests.helpers.scripted import ScriptedModel
from tests.helpers.tiny_checkpoint import SPECIAL_TOKENS
from tests.helpers.tiny_checkpoint import VOCAB_SIZE as BYTE_VOCAB_SIZE

PROMPT = (3, 1, 4, 1, 5)
LONG = {"max_context": 10**6, "num_blocks": 10**5}


@pytest.fixture
def manager():
    tiny_reference("llama", PROMPT, 6)  # computed once, while the model is not lent
    with cbgen.continuous_batching_context_manager(
        tiny_model("llama"),
        GenerationConfig(max_new_tokens=6),
        continuous_batching_config={"return_logprobs": True},
    ) as manager:
        yield manager


def test_a_stream_has_an_output_for_each_token_and_each_holds_all_so_far(manager):
    expected = tiny_reference("llama", PROMPT, 6)
    manager.add_request(PROMPT, request_id="a", streaming=True)
    chunks = list(manager.request_id_iter("a"))
    assert [chunk.generated_tokens for chunk in chunks] == [
        expected[: place + 1] for place in range(6)
    ]
    assert [chunk.new_tokens for chunk in chunks] == [[token] for token in expected]
    assert [len(chunk.logprobs) for chunk in chunks] == [1, 2, 3, 4, 5, 6]
    assert {chunk.status for chunk in chunks[:-1]} == {RequestStatus.DECODING}
    assert chunks[-1].status is RequestStatus.FINISHED
    assert chunks[-1].finish_reason == "length"
    assert all(isinstance(chunk, GenerationOutput) for chunk in chunks)


def test_an_output_of_a_stream_stays_as_it_was_while_the_request_goes_on(manager):
    manager.add_request(PROMPT, request_id="a", streaming=True)
    stream = manager.request_id_iter("a")
    first = next(stream)
    rest = list(stream)
    assert len(first.generated_tokens) == 1
    assert not first.is_finished()
    assert len(rest) == 5


def test_streams_of_a_manager_can_be_iterated_together(manager):
    ids = manager.add_requests([PROMPT, PROMPT], streaming=True)
    counts = dict.fromkeys(ids, 0)
    for chunk in manager:
        counts[chunk.request_id] += 1
    assert counts == dict.fromkeys(ids, 6)


def test_a_stream_that_is_left_early_gives_its_rest_to_others(manager):
    manager.add_request(PROMPT, request_id="a", streaming=True)
    stream = manager.request_id_iter("a")
    next(stream)
    stream.close()
    rest = []
    while not rest or not rest[-1].is_finished():
        rest.append(manager.get_result("a", timeout=PATIENCE))
    assert len(rest) == 5


def test_a_request_that_does_not_stream_gives_its_final_output_alone(manager):
    manager.add_request(PROMPT, request_id="a")
    (output,) = manager.request_id_iter("a")
    assert output.generated_tokens == tiny_reference("llama", PROMPT, 6)


def test_following_a_request_whose_output_was_fetched_ends_at_once(scripted):
    manager = scripted()
    manager.add_request([1], request_id="a", max_new_tokens=1)
    manager.add_request([1], request_id="b", max_new_tokens=1)
    assert manager.get_result("a", timeout=PATIENCE) is not None
    seen: list[str] = []
    run_threads(
        [
            lambda: seen.extend(manager.request_id_iter("a")),
            lambda: seen.extend(output.request_id for output in manager.as_completed(["a", "b"])),
        ]
    )
    assert seen == ["b"]


def test_a_handler_may_come_before_another_request_of_an_id_that_is_used_again(scripted):
    manager = scripted()

    async def wait() -> GenerationOutput:
        done = asyncio.get_running_loop().create_future()
        manager.register_result_handler("a", done.set_result)
        manager.add_request([1], request_id="a", max_new_tokens=1)
        return await asyncio.wait_for(done, PATIENCE)

    for _ in range(2):
        assert asyncio.run(wait()).generated_tokens == [2]


def test_following_waits_for_another_request_of_an_id_that_is_used_again(scripted):
    manager = scripted()
    manager.add_request([1], request_id="a", max_new_tokens=1)
    assert manager.get_result("a", timeout=PATIENCE) is not None
    seen: list[cbgen.RequestOutput] = []
    with manager.pause():
        manager.add_request([1], request_id="a", max_new_tokens=1)
        reader = threading.Thread(
            target=lambda: seen.extend(manager.request_id_iter("a")), daemon=True
        )
        reader.start()
        reader.join(0.02)
        assert reader.is_alive()
    reader.join(PATIENCE)
    assert [output.generated_tokens for output in seen] == [[2]]


def test_timestamps_of_a_stream_grow_with_it(manager):
    manager.add_request(PROMPT, request_id="a", streaming=True, record_timestamps=True)
    chunks = list(manager.request_id_iter("a"))
    assert [len(chunk.timestamps) for chunk in chunks] == [1, 2, 3, 4, 5, 6]
    assert chunks[2].timestamps == chunks[-1].timestamps[:3]


def test_a_wrong_request_that_streams_ends_its_stream(manager):
    manager.add_request(PROMPT, request_id="a", streaming=True, temperature=-1.0)
    (output,) = manager.request_id_iter("a")
    assert (output.error_code, output.new_tokens) == ("invalid_generation_config", [])


def test_without_a_tokenizer_there_is_no_text(manager):
    manager.add_request(PROMPT, request_id="a", streaming=True)
    chunk = next(manager.request_id_iter("a"))
    with pytest.raises(cbgen.UsageError, match="give it to the manager as tokenizer"):
        _ = chunk.text_delta


@pytest.fixture
def spelling(monkeypatch, checkpoint, scripted):
    """Return a function that streams an answer of the given bytes, with a tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def start(text: str, **options):
        token_ids = tokenizer.encode(text)
        script = ScriptedModel(
            lambda token, position: {token_ids[position] if position < len(token_ids) else 1: 9.0},
            vocab_size=BYTE_VOCAB_SIZE,
        )
        manager = scripted(script, **LONG)
        manager.reconfigure(manager._engine._setup, manager._settings, tokenizer)
        manager.add_request(
            [0],
            request_id="a",
            streaming=True,
            **({"max_new_tokens": len(token_ids) + 1} | options),
        )
        return manager, tokenizer

    return start


TEXT = "Grüße, 你好 🙂🏽! e\u0301"


def test_pieces_of_text_are_whole_characters_and_join_to_the_text(spelling):
    manager, _ = spelling(TEXT, eos_token_id=1)
    chunks = list(manager.request_id_iter("a"))
    pieces = [chunk.text_delta for chunk in chunks]
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert len(chunks) == len(TEXT.encode()) + 1
    assert [piece for piece in pieces if piece][:5] == ["G", "r", "ü", "ß", "e"]


def test_text_may_be_read_late_out_of_order_and_twice(spelling):
    manager, _ = spelling(TEXT, eos_token_id=1)
    chunks = list(manager.request_id_iter("a"))
    assert chunks[-1].text_delta == ""
    assert chunks[2].text_delta == ""
    assert "".join(chunk.text_delta for chunk in chunks) == TEXT


def test_special_tokens_are_part_of_the_text_where_a_request_says_so(spelling):
    manager, _ = spelling("hi", eos_token_id=1, skip_special_tokens=False)
    text = "".join(chunk.text_delta for chunk in manager.request_id_iter("a"))
    assert text == "hi" + SPECIAL_TOKENS[1]


def test_an_answer_that_ends_inside_of_a_character_gives_its_rest_at_the_end(spelling):
    manager, tokenizer = spelling("a🙂", max_new_tokens=3)
    chunks = list(manager.request_id_iter("a"))
    assert [chunk.text_delta for chunk in chunks[:2]] == ["a", ""]
    text = "".join(chunk.text_delta for chunk in chunks)
    assert text == tokenizer.decode(chunks[-1].generated_tokens)
    assert text.endswith("\ufffd")


def test_a_stream_gives_no_text_at_or_behind_a_stop_string(spelling):
    manager, tokenizer = spelling("one; two;;; three", stop_strings=[";;", "never"])
    chunks = list(manager.request_id_iter("a"))
    assert "".join(chunk.text_delta for chunk in chunks) == "one; two"
    # Text that may become a stop string comes once it is known that it does not.
    pieces = [chunk.text_delta for chunk in chunks]
    assert pieces == ["o", "", "", "ne", "; ", "t", "w", "o", "", ""]
    assert chunks[-1].finish_reason == "stop"
    assert [chunk.stop_string for chunk in chunks] == [None] * 9 + [";;"]
    assert tokenizer.decode(chunks[-1].generated_tokens) == "one; two;;"


def test_a_stop_string_is_found_across_the_bytes_of_characters(spelling):
    manager, tokenizer = spelling("ä🙂! and more", stop_strings=["🙂!"])
    chunks = list(manager.request_id_iter("a"))
    assert "".join(chunk.text_delta for chunk in chunks) == "ä"
    assert tokenizer.decode(chunks[-1].generated_tokens) == "ä🙂!"
    assert pickle.loads(pickle.dumps(chunks[-1])).stop_string == "🙂!"


def test_a_stream_works_in_an_event_loop(manager):
    async def read() -> list[int]:
        manager.add_request(PROMPT, request_id="a", streaming=True)
        return [
            token async for chunk in manager.request_id_aiter("a") for token in chunk.new_tokens
        ]

    assert asyncio.run(read()) == tiny_reference("llama", PROMPT, 6)


def test_many_streams_in_one_event_loop_do_not_mix(scripted):
    manager = scripted(max_context=200, num_blocks=1000)

    async def read(number: int) -> list[int]:
        name = manager.add_request([number], streaming=True, max_new_tokens=20)
        return [
            token async for chunk in manager.request_id_aiter(name) for token in chunk.new_tokens
        ]

    async def read_all() -> list[list[int]]:
        return await asyncio.gather(*map(read, range(40)))

    assert asyncio.run(read_all()) == [list(range(n + 1, n + 21)) for n in range(40)]


def test_an_event_loop_is_told_of_the_death(scripted):
    manager = scripted(
        ScriptedModel(vocab_size=VOCAB_SIZE, before_step=failing_at(3, ValueError("bad"))), **LONG
    )

    async def read() -> None:
        manager.add_request([1], request_id="a", streaming=True)
        async for _ in manager.request_id_aiter("a"):
            pass

    with pytest.raises(cbgen.EngineDied, match="bad"):
        asyncio.run(asyncio.wait_for(read(), PATIENCE))


def test_a_reader_that_is_cancelled_leaves_the_rest_to_others(scripted):
    gate = Gate(4)
    manager = scripted(ScriptedModel(vocab_size=VOCAB_SIZE, before_step=gate), **LONG)

    async def read() -> None:
        async for _ in manager.request_id_aiter("a"):
            pass

    async def cancel() -> None:
        manager.add_request([1], request_id="a", streaming=True, max_new_tokens=6)
        reading = asyncio.create_task(read())
        while not gate.reached.is_set():
            await asyncio.sleep(0.001)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    asyncio.run(cancel())
    gate.opened.set()
    outputs = []
    while not outputs or not outputs[-1].is_finished():
        outputs.append(manager.get_result("a", timeout=PATIENCE))
    assert outputs[-1].generated_tokens == [2, 3, 4, 5, 6, 7]


def test_a_result_handler_is_called_on_the_loop_that_registered_it(manager):
    async def handle() -> tuple[list[int], set[int]]:
        done = asyncio.get_running_loop().create_future()
        counts, threads = [], set()

        def take(output: GenerationOutput) -> None:
            counts.append(len(output.generated_tokens))
            threads.add(threading.get_ident())
            if output.is_finished():
                done.set_result(None)

        manager.register_result_handler("a", take)
        manager.add_request(PROMPT, request_id="a", streaming=True)
        await asyncio.wait_for(done, PATIENCE)
        return counts, threads

    counts, threads = asyncio.run(handle())
    assert counts == [1, 2, 3, 4, 5, 6]
    assert threads == {threading.get_ident()}


def test_handlers_of_two_loops_get_their_own_results(manager):
    async def wait(name: str) -> str:
        done = asyncio.get_running_loop().create_future()
        manager.register_result_handler(name, done.set_result)
        manager.add_request(PROMPT, request_id=name)
        return (await asyncio.wait_for(done, PATIENCE)).request_id

    got = {}
    threads = [
        threading.Thread(target=lambda n=name: got.update({n: asyncio.run(wait(n))}), daemon=True)
        for name in ("a", "b")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert got == {"a": "a", "b": "b"}


def test_a_handler_that_comes_late_gets_what_is_there(manager):
    async def wait() -> GenerationOutput:
        done = asyncio.get_running_loop().create_future()
        manager.add_request(PROMPT, request_id="a")
        while "a" in manager._router._unanswered:
            await asyncio.sleep(0.001)
        manager.register_result_handler("a", done.set_result)
        return await asyncio.wait_for(done, PATIENCE)

    assert len(asyncio.run(wait()).generated_tokens) == 6


def test_a_handler_whose_loop_is_closed_harms_nobody(manager):
    async def register() -> None:
        manager.register_result_handler("a", lambda output: None)

    asyncio.run(register())
    manager.add_request(PROMPT, request_id="a")
    assert len(manager.get_result("a", timeout=PATIENCE).generated_tokens) == 6


def test_a_handler_is_told_of_the_death_by_a_failed_output(scripted):
    manager = scripted(
        ScriptedModel(vocab_size=VOCAB_SIZE, before_step=failing_at(3, ValueError("bad"))), **LONG
    )

    async def wait() -> GenerationOutput:
        done = asyncio.get_running_loop().create_future()
        manager.register_result_handler("a", done.set_result)
        manager.add_request([1], request_id="a")
        return await asyncio.wait_for(done, PATIENCE)

    output = asyncio.run(wait())
    assert (output.status, output.generated_tokens) == (RequestStatus.FAILED, [2, 3])
    assert "bad" in output.error


def test_a_long_stream_that_nobody_reads_takes_little_memory(scripted, monkeypatch):
    monkeypatch.delenv("CBGEN_CHECK")
    num_tokens = 4000
    flat = ScriptedModel(lambda token, position: {}, vocab_size=VOCAB_SIZE)
    manager = scripted(flat, max_context=10_000, num_blocks=10_000, page_size=64)
    manager.add_request([1], request_id="a", streaming=True, max_new_tokens=num_tokens)
    manager.stop()
    chunks = list(iter(manager.get_result, None))
    assert len(chunks) == num_tokens
    own_bytes = sum(sys.getsizeof(chunk) for chunk in chunks)
    assert own_bytes < 400 * num_tokens  # cumulative copies would be 32,000 a chunk at the end
    assert len(chunks[-1].generated_tokens) == num_tokens


def test_outputs_can_be_pickled_and_copied_while_their_request_goes_on(spelling):
    manager, _ = spelling("héy", eos_token_id=1, record_timestamps=True)
    stream = manager.request_id_iter("a")
    chunks = [next(stream) for _ in range(3)]
    for chunk in chunks:
        for twin in (pickle.loads(pickle.dumps(chunk)), copy.deepcopy(chunk)):
            assert twin == chunk
            assert twin.new_tokens == chunk.new_tokens
            assert twin.text_delta == chunk.text_delta
            assert twin.timestamps == chunk.timestamps
    *_, last = stream
    assert pickle.loads(pickle.dumps(last)) == last


def test_chunks_can_be_given_to_torch_and_to_a_tokenizer(manager, checkpoint):
    manager.add_request(PROMPT, request_id="a", streaming=True)
    *_, last = manager.request_id_iter("a")
    assert torch.tensor(last.generated_tokens).shape == (6,)
    assert isinstance(AutoTokenizer.from_pretrained(checkpoint).decode(last.generated_tokens), str)
