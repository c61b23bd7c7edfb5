"""What a manager was asked to run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from cbgen.engine.config import ContinuousBatchingConfig, WorkloadHints

_FIELDS_OF_REQUESTS = ("seed", "return_logprobs", "max_queue_size")
"""Fields that an engine is not built by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """How the engine is to be built."""

    config: ContinuousBatchingConfig
    attn_implementation: str = "auto"
    hints: WorkloadHints = field(default_factory=WorkloadHints)

    def differences(self, other: EngineSetup) -> list[str]:
        """Return the names of the settings for which `other` needs another engine than this."""
        names = [
            item.name
            for item in fields(ContinuousBatchingConfig)
            if item.name not in _FIELDS_OF_REQUESTS
            and getattr(self.config, item.name) != getattr(other.config, item.name)
        ]
        if self.attn_implementation != other.attn_implementation:
            names.append("attn_implementation")
        if not all(
            _covers(getattr(self.hints, item.name), getattr(other.hints, item.name))
            for item in fields(WorkloadHints)
        ):
            names.append("workload_hints")
        return names


def _covers(built_for: int, wanted: int) -> bool:
    """Whether an engine that was sized for one hint is large enough for another; 0 = unknown."""
    return built_for == 0 or 0 < wanted <= built_for
