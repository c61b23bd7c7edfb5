"""Process settings of every test, set before anything imports torch: few threads, no model hub.

A worker of parallel tests computes on one thread, so that the workers share the cores.

Generated examples are the same in every run, so that a change is judged by itself; with
HYPOTHESIS_PROFILE=search in the environment they are new ones each time. No example has a deadline:
how long it takes is the load of the machine.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from tests.helpers.tiny_checkpoint import save_tiny_checkpoint

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
else:
    os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell ignores SIGINT in what it starts in the background; the commands of tests are to hear it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("search", derandomize=False, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random model with a byte-level tokenizer and a chat template."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")
