from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.helpers.tiny_checkpoint import save_tiny_checkpoint


@pytest.fixture(autouse=True)
def _frozen_heap() -> Iterator[None]:
    """A job collects garbage before it begins: spare it the objects of the test libraries."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Folder of a tiny random model with a byte-level tokenizer and a chat template."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
