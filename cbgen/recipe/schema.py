"""What a recipe may hold: its sections, and every field's name, type, default and documentation.

The sections `model` and `continuous_batching_config` belong to `cbgen.engine.config`, the fields of
`generation_config` to `cbgen.generation.fields`. A field is documented by the text under it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from cbgen.engine.config import (
    ATTENTION_BACKENDS,
    DTYPES,
    QUANTIZATIONS,
    SCHEDULER_TYPES,
    ContinuousBatchingConfig,
    ModelConfig,
)
from cbgen.errors import RecipeError, UsageError
from cbgen.generation.fields import GENERATION_SECTION
from cbgen.values import Annotation, Plain


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
        for name, off in (("top_logprobs", 0), ("prompt_logprobs", None)):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UsageError(f"output.{name} must be at least 0, got {value}")
            if value != off:
                raise UsageError(f"output.{name} = {value} is not supported yet; remove it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A checked recipe; nothing in it depends on the model or the machine."""

    model: ModelConfig
    """Which model to load and how."""
    prompt: PromptConfig
    """How an input row becomes prompt tokens."""
    generation_config: Mapping[str, Any]
    """Sampling and stopping: what the recipe gave, null left out (section `generation_config`)."""
    continuous_batching_config: ContinuousBatchingConfig
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

    @contextmanager
    def placing_errors(self) -> Iterator[None]:
        """Add the place of the setting to a `UsageError` that names it by its `key`.

        Raises:
            RecipeError: the error with its place.
        """
        try:
            yield
        except UsageError as error:
            origin = self.origins.get(error.key or "", "recipe")
            if origin == "recipe":  # a mapping has no lines
                raise
            place = f"--set {error.key}" if origin == "command line" else origin
            raise RecipeError(f"{place}: {error}") from error

    @property
    def seed(self) -> int | None:
        """The run seed from either of its two places; None if neither has it."""
        seed: int | None = self.generation_config.get("seed", self.continuous_batching_config.seed)
        return seed


BATCHING_SECTION = "continuous_batching_config"
SECTION_ORDER = ("model", "prompt", GENERATION_SECTION, BATCHING_SECTION, "output")
SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "prompt": PromptConfig,
    BATCHING_SECTION: ContinuousBatchingConfig,
    "output": OutputConfig,
}
"""Sections whose fields are those of a dataclass."""
SWITCHES = ("generation_defaults", "deterministic")
"""Fields of a recipe that stand outside of any section."""

SECTION_SPELLINGS = {
    "GenerationConfig": GENERATION_SECTION,
    "ContinuousBatchingConfig": BATCHING_SECTION,
}
"""Other spellings of section names."""
DEPRECATED_FIELDS = {
    "block_size": "page_size",
    "use_default_compile_configs": "default_compile_level",
    "max_cached_graphs": None,
}
"""Deprecated fields of continuous_batching_config and what replaces them; None: nothing does."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": DTYPES,
    "attn_implementation": ATTENTION_BACKENDS,
    "quantization": QUANTIZATIONS,
    "scheduler_type": SCHEDULER_TYPES,
}
"""Choices of fields that are annotated as `str` alone, or as that or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeField:
    """One field that a user may give."""

    name: str
    type: Annotation
    default: Plain
    """`dataclasses.MISSING` for a field that must be given."""
    doc: str

    @property
    def is_required(self) -> bool:
        """Whether a recipe without the field is refused."""
        return self.default is dataclasses.MISSING


def section_fields(section: str) -> Iterator[RecipeField]:
    """Yield the fields of a section that is a dataclass, in order."""
    return _fields(SECTIONS[section])


def switch_fields() -> Iterator[RecipeField]:
    """Yield the fields that stand outside of any section."""
    return (item for item in _fields(Recipe) if item.name in SWITCHES)


def _fields(cls: type) -> Iterator[RecipeField]:
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    for item in dataclasses.fields(cls):
        kind = hints[item.name]
        if choices := _CHOICES.get(item.name):
            is_nullable = type(None) in typing.get_args(kind)
            kind = typing.Literal[choices]
            kind = typing.Optional[kind] if is_nullable else kind  # noqa: UP045  for mypy
        yield RecipeField(name=item.name, type=kind, default=default_of(item), doc=docs[item.name])


def default_of(item: dataclasses.Field[Any]) -> object:
    """Return the default of a field, `dataclasses.MISSING` where it has none."""
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the text under each annotated field of a class, on one line, in order of the source.

    Fields without a text are left out.
    """
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs
