"""cbgen: offline generation with Hugging Face models, by continuous batching.

    import cbgen
    for row in cbgen.run("recipe.yaml", [{"prompt": "What is the capital of France?"}]):
        print(row["text"])

    outputs = cbgen.generate_batch(model, inputs=[[1, 2, 3]], max_new_tokens=20)

Importing this package loads neither torch nor transformers; the first use of a function does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from cbgen.errors import CbgenError, EngineError, UsageError

if TYPE_CHECKING:
    from cbgen.engine.config import ContinuousBatchingConfig, WorkloadHints
    from cbgen.engine.request import FinishReason, GenerationOutput, RequestStatus
    from cbgen.job.run_rows import Engine, run
    from cbgen.manager.functions import (
        continuous_batching_context_manager,
        destroy_cached_continuous_batching_manager,
        generate_batch,
        init_continuous_batching,
    )
    from cbgen.manager.manager import ContinuousBatchingManager
    from cbgen.manager.outputs import EngineDied, ManagerStopped, RequestOutput

__all__ = [
    "CbgenError",
    "ContinuousBatchingConfig",
    "ContinuousBatchingManager",
    "Engine",
    "EngineDied",
    "EngineError",
    "FinishReason",
    "GenerationOutput",
    "ManagerStopped",
    "RequestOutput",
    "RequestStatus",
    "UsageError",
    "WorkloadHints",
    "continuous_batching_context_manager",
    "destroy_cached_continuous_batching_manager",
    "generate_batch",
    "init_continuous_batching",
    "run",
]
__version__ = "0.1.0"

_HOMES = {
    "cbgen.engine.config": ("ContinuousBatchingConfig", "WorkloadHints"),
    "cbgen.engine.request": ("FinishReason", "GenerationOutput", "RequestStatus"),
    "cbgen.job.run_rows": ("Engine", "run"),
    "cbgen.manager.functions": (
        "continuous_batching_context_manager",
        "destroy_cached_continuous_batching_manager",
        "generate_batch",
        "init_continuous_batching",
    ),
    "cbgen.manager.manager": ("ContinuousBatchingManager",),
    "cbgen.manager.outputs": ("EngineDied", "ManagerStopped", "RequestOutput"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'cbgen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
