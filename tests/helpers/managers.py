"""Managers for tests: over a tiny model, or over a scripted one whose steps the test can hold."""

from __future__ import annotations

import threading
from collections.abc import Callable

from transformers import GenerationConfig

import cbgen
from cbgen.engine.build import BuiltEngine
from cbgen.engine.request import GenerationOutput
from cbgen.errors import EngineError
from cbgen.manager import background_engine
from tests.helpers.models import VOCAB_SIZE, tiny_model
from tests.helpers.scripted import ScriptedModel, make_scripted_engine

PATIENCE = 30.0
"""Seconds after which a test that waits for an event has failed."""


class Gate:
    """Holds the model before a step until the test opens it."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, step: int) -> None:
        if step == self.step:
            self.reached.set()
            assert self.opened.wait(PATIENCE)


def failing_at(step: int, error: BaseException) -> Callable[[int], None]:
    """Return a `before_step` that raises at one step."""

    def before_step(number: int) -> None:
        if number == step:
            raise error

    return before_step


class ListSink:
    """Keeps what the loop hands over, and lets a test wait for it."""

    def __init__(self) -> None:
        self.outputs: dict[str, GenerationOutput] = {}
        self.error: EngineError | None = None
        self._changed = threading.Condition()

    def put(self, outputs) -> None:
        with self._changed:
            self.outputs.update((output.request_id, output) for output in outputs)
            self._changed.notify_all()

    def close(self, failure: EngineError | None) -> None:
        with self._changed:
            self.error = failure
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.outputs) >= count, PATIENCE)

    def wait_for_failure(self) -> EngineError:
        with self._changed:
            assert self._changed.wait_for(lambda: self.error is not None, PATIENCE)
            return self.error


class Facts:
    """Stands for the facts of a tiny model, as far as a manager looks at them."""

    def __init__(self, model) -> None:
        self.dtype, self.device = model.dtype, model.device


def scripted_manager(monkeypatch, model: ScriptedModel | None = None, *, queue: int = 0, **plan):
    """Return a manager, not started, whose engine runs a scripted model.

    The tiny llama is what it borrows; `plan` are fields of EnginePlan. Without `max_new_tokens` a
    request ends with the context, which `plan` may set.
    """
    scripted = model or ScriptedModel(vocab_size=VOCAB_SIZE)
    owner = tiny_model("llama")

    def build(*_arguments, **_options) -> BuiltEngine:
        return BuiltEngine(make_scripted_engine(scripted, **plan), None, Facts(owner))

    monkeypatch.setattr(background_engine, "build_engine", build)
    return cbgen.init_continuous_batching(
        owner, GenerationConfig(eos_token_id=-1), {"max_queue_size": queue}
    )


def run_threads(workers: list[Callable[[], object]], timeout: float = PATIENCE) -> None:
    """Run functions on threads of their own and raise what the first of them to fail raised."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised again below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a worker did not end"
