"""cbgen: offline generation with Hugging Face models, by continuous batching.

    import cbgen
    for row in cbgen.run("recipe.yaml", [{"prompt": "What is the capital of France?"}]):
        print(row["text"])

Importing this package loads neither torch nor transformers; the first use of a function does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbgen.job.api import run

__all__ = ["run"]
__version__ = "0.1.0"

_HOMES = {"run": "cbgen.job.api"}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'cbgen' has no attribute {name!r}")
