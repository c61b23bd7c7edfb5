"""What the garbage collector goes through while a job runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the collector off while libraries are imported: what they make stays.

    It takes a quarter of the time of importing torch and transformers.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep the collector off all objects that are there now.

    The libraries of a model make hundreds of thousands of them, which live as long as the process.
    Going through them again and again costs more than reading and writing rows does.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
