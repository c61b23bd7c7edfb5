"""Managers that are dropped while they run: their threads end and the model is given back."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest
from transformers import GenerationConfig, LlamaForCausalLM

import cbgen
from cbgen.engine.request import RequestStatus
from tests.helpers.managers import PATIENCE
from tests.helpers.models import random_model, tiny_config

PROMPT = (3, 1, 4, 1, 5)
LONG = GenerationConfig(max_new_tokens=240)


@pytest.fixture
def model():
    return random_model(LlamaForCausalLM, tiny_config("llama"))


def running(model):
    manager = cbgen.init_continuous_batching(model, LONG)
    manager.start()
    return manager


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "cbgen-engine"]


def wait_for_the_end(threads: list[threading.Thread]) -> None:
    assert threads
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.mark.parametrize("num_requests", [0, 3])
def test_a_running_manager_that_is_dropped_gives_the_model_back(model, caplog, num_requests):
    model.train()
    manager = running(model)
    manager.add_requests([PROMPT] * num_requests, streaming=True)
    threads = engine_threads()
    del manager
    wait_for_the_end(threads)
    assert (model.config._attn_implementation, model.training) == ("sdpa", True)
    assert "dropped while it ran" in caplog.text


def test_nothing_holds_a_manager_that_runs(model):
    manager = running(model)
    manager.add_request(PROMPT, request_id="a", streaming=True)
    next(manager.request_id_iter("a"))
    threads = engine_threads()
    dropped = weakref.ref(manager)
    del manager
    assert dropped() is None
    wait_for_the_end(threads)


def test_a_stream_keeps_its_manager(model):
    manager = running(model)
    stream = manager.request_id_iter(manager.add_request(PROMPT, max_new_tokens=5, streaming=True))
    del manager
    threads = engine_threads()
    assert len(list(stream)) == 5
    del stream
    wait_for_the_end(threads)


def test_a_handler_learns_that_its_manager_was_dropped(model):
    async def wait() -> cbgen.RequestOutput:
        done = asyncio.get_running_loop().create_future()
        manager = running(model)
        manager.register_result_handler("a", done.set_result)
        manager.add_request(PROMPT, request_id="a")
        del manager
        return await asyncio.wait_for(done, PATIENCE)

    assert asyncio.run(wait()).status is RequestStatus.FAILED


def test_a_manager_that_still_stops_is_left_to_its_end(model, caplog):
    manager = running(model)
    manager.add_requests([PROMPT] * 3)
    manager.stop(block=False)
    threads = engine_threads()
    del manager
    wait_for_the_end(threads)
    assert "dropped" not in caplog.text


def test_a_kept_manager_that_runs_stays_with_its_model(model):
    manager = running(model)
    manager.stop(keep_for_next_session=True)
    manager.start()
    del manager
    gc.collect()
    again = cbgen.init_continuous_batching(model, LONG)
    assert again.is_running()
    again.destroy()


def test_a_model_with_a_kept_manager_can_be_collected(model):
    cbgen.generate_batch(model, [PROMPT], max_new_tokens=1, persistent_manager=True)
    own = random_model(LlamaForCausalLM, tiny_config("llama"))
    cbgen.generate_batch(own, [PROMPT], max_new_tokens=1, persistent_manager=True)
    dropped = weakref.ref(own)
    del own
    gc.collect()
    assert dropped() is None
