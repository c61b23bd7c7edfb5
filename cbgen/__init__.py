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
    "ContinuousBatchingConfig": "cbgen.engine.config",
    "ContinuousBatchingManager": "cbgen.manager.manager",
    "Engine": "cbgen.job.run_rows",
    "EngineDied": "cbgen.manager.outputs",
    "FinishReason": "cbgen.engine.request",
    "GenerationOutput": "cbgen.engine.request",
    "ManagerStopped": "cbgen.manager.outputs",
    "RequestOutput": "cbgen.manager.outputs",
    "RequestStatus": "cbgen.engine.request",
    "WorkloadHints": "cbgen.engine.config",
    "continuous_batching_context_manager": "cbgen.manager.functions",
    "destroy_cached_continuous_batching_manager": "cbgen.manager.functions",
    "generate_batch": "cbgen.manager.functions",
    "init_continuous_batching": "cbgen.manager.functions",
    "run": "cbgen.job.run_rows",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'cbgen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
