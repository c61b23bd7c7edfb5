"""Pauses of the garbage collector, which costs more than rows do once a model is loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Turn the collector off while libraries are imported: what they make lives on anyway.

    Collecting takes a quarter of the time of importing torch and transformers.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def gc_ignores_existing_objects() -> Iterator[None]:
    """Let the collector pass over all objects that exist now.

    The libraries of a model make hundreds of thousands of them, which live as long as the process.
    Going through them again and again costs more than reading and writing rows does.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
