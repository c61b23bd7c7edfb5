from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _frozen_heap() -> Iterator[None]:
    """A job collects garbage before it begins: spare it the objects of the test libraries."""
    gc.freeze()
    yield
    gc.unfreeze()
