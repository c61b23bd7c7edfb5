"""What all tests of the Python API share: checked bookkeeping, and nothing left behind."""

from __future__ import annotations

import functools
import threading

import pytest

import cbgen
from tests.helpers.managers import PATIENCE, scripted_manager

BOUND_NAMES = (
    "generate_batch",
    "init_continuous_batching",
    "continuous_batching_context_manager",
    "destroy_cached_continuous_batching_manager",
)


@pytest.fixture(autouse=True)
def _check_after_every_step(monkeypatch):
    monkeypatch.setenv("CBGEN_CHECK", "1")


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    engines = [thread for thread in threading.enumerate() if thread.name == "cbgen-engine"]
    for thread in engines:
        thread.join(5)
    assert not any(thread.is_alive() for thread in engines), "a test left an engine running"


@pytest.fixture
def bound(monkeypatch):
    """Put cbgen's functions on a model class, in place of those of transformers."""

    def bind(model_class: type) -> None:
        for name in BOUND_NAMES:
            method = functools.partialmethod(getattr(cbgen, name))
            monkeypatch.setattr(model_class, name, method, raising=False)

    return bind


@pytest.fixture
def scripted(monkeypatch):
    """Return a function that starts a manager over a scripted model; all end with the test."""
    managers = []

    def start(model=None, **options):
        manager = scripted_manager(monkeypatch, model, **options)
        managers.append(manager)
        manager.start()
        return manager

    yield start
    for manager in managers:
        if manager.is_running():
            manager.stop(hard_stop=True, timeout=PATIENCE)
        manager.destroy()
