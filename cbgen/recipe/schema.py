"""The sections of a recipe that are the job's own, and the checked recipe as a whole.

The sections `model` and `continuous_batching_config` belong to `cbgen.engine.config`, the fields of
`generation_config` to `cbgen.generation.fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cbgen.engine.config import ContinuousBatchingConfig, ModelConfig
from cbgen.errors import UsageError
from cbgen.generation.fields import GENERATION_SECTION as GENERATION_SECTION


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptConfig:
    """How an input row becomes prompt tokens (section `prompt`)."""

    template: str | None = None
    """Prompt over the row's columns, such as "Question: {question}"; {{ }} for literal braces."""
    system: str | None = None
    """System message put before a row's messages, or before a prompt that is sent as chat."""
    chat: Literal["auto"] | bool = "auto"
    """Send a plain prompt through the chat template."""
    chat_template: str | None = None
    """Chat template in place of the model's own: its text, or a file that holds it."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as enable_thinking."""
    add_special_tokens: Literal["auto"] | bool = "auto"
    """Let the tokenizer add BOS and the like; auto = never twice."""
    max_length: int | None = None
    """Most tokens a prompt may have; null = what the context leaves."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What happens to a longer prompt: an error row, or tokens cut from that side."""

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 1:
            raise UsageError(f"prompt.max_length must be at least 1, got {self.max_length}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """What an output row holds and in which order rows come (section `output`)."""

    logprobs_mode: Literal["raw", "processed"] = "raw"
    """Log-probabilities of the model's own distribution, or of what sampling made of it."""
    top_logprobs: int = 0
    """Alternatives given for each generated token."""
    prompt_logprobs: int | None = None
    """Alternatives given for each prompt token; null = no log-probabilities of the prompt."""
    token_ids: bool = False
    """Also write prompt_token_ids and token_ids."""
    columns: Literal["all", "none"] | tuple[str, ...] = "all"
    """Input columns copied to the output row: all, none or a list of names."""
    order: Literal["input", "completion"] = "input"
    """Rows in the order of the input, or as they finish."""
    on_duplicate_id: Literal["error", "suffix"] = "error"
    """A repeated id makes the later row an error row, or gets a suffix."""

    def __post_init__(self) -> None:
        for name in ("top_logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UsageError(f"output.{name} must be at least 0, got {value}")
        if self.top_logprobs > 0:
            raise UsageError(
                f"output.top_logprobs = {self.top_logprobs} is not supported yet; remove it"
            )
        if self.prompt_logprobs is not None:
            raise UsageError(
                f"output.prompt_logprobs = {self.prompt_logprobs} is not supported yet; remove it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A checked recipe; nothing in it depends on the model or the machine."""

    model: ModelConfig
    """Which model to load and how."""
    prompt: PromptConfig
    """How an input row becomes prompt tokens."""
    generation: Mapping[str, Any]
    """Sampling and stopping: what the recipe gave, null left out (section `generation_config`)."""
    continuous_batching: ContinuousBatchingConfig
    """Cache, batch and schedule settings."""
    output: OutputConfig
    """What an output row holds and in which order rows come."""
    generation_defaults: Literal["model", "none"] = "model"
    """Whether the model's own generation_config.json counts where this recipe says nothing."""
    deterministic: Literal["auto", True] = "auto"
    """auto, or true: the same tokens whatever else is in the batch, or a refusal."""
    digest: str
    """Hash of what the recipe says, without comments, order and spelling."""
    origins: Mapping[str, str]
    """Place of every given value: "section.key" to "recipe.yaml:12" or "command line"."""

    @property
    def seed(self) -> int | None:
        """The run seed from either of its two places; None where neither has it."""
        seed: int | None = self.generation.get("seed", self.continuous_batching.seed)
        return seed


BATCHING_SECTION = "continuous_batching_config"

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "prompt": PromptConfig,
    BATCHING_SECTION: ContinuousBatchingConfig,
    "output": OutputConfig,
}
"""Sections whose fields are those of a dataclass."""

SECTION_ORDER = ("model", "prompt", GENERATION_SECTION, BATCHING_SECTION, "output")
SWITCHES = ("generation_defaults", "deterministic")
"""Fields of a recipe that stand outside of any section."""

SECTION_SPELLINGS = {
    "GenerationConfig": GENERATION_SECTION,
    "ContinuousBatchingConfig": BATCHING_SECTION,
}
"""Other spellings of section names."""
