"""What all engine tests share: the engine verifies its bookkeeping after every step."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _check_after_every_step(monkeypatch):
    monkeypatch.setenv("CBGEN_CHECK", "1")
