"""How one request samples and when it stops: validated, immutable, without torch."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Literal

from cbgen.values import Range

MAX_SEED = 2**63 - 1
RANGES = {
    "temperature": Range(at_least=0, at_most=1_000_000),  # above, float32 scores are all alike
    "top_k": Range(at_least=0),
    "top_p": Range(above=0, at_most=1),
    "min_p": Range(at_least=0, at_most=1),
    "repetition_penalty": Range(above=0),
    "seed": Range(at_least=0, at_most=MAX_SEED),
    "max_new_tokens": Range(at_least=1),
}
"""Ranges of the parameters that are numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request, with nothing left to decide.

    A temperature of 0 is greedy; the filters are then without effect. Filters apply in the order of
    `transformers.generation`: temperature, top_k, top_p, min_p.

    Raises:
        ValueError: a value is out of range; the text names the field and the value.
    """

    temperature: float = 0.0
    """0 = greedy, else the divisor of the logits."""
    top_k: int = 0
    """Keep the k best tokens; 0 = off. Values above the vocabulary size keep all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p; 1.0 = off."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as probable as the best; 0.0 = off."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens of prompt and answer; 1.0 = off."""
    seed: int = 0
    """Row seed of the counter-based noise, in [0, 2**63)."""
    max_new_tokens: int | None = None
    """Most tokens to generate; None = what the context leaves."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer; the token itself is part of it."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end the answer; its text is cut before the one that begins first."""
    skip_special_tokens: bool = True
    """Whether the answer's text, in which stop strings are looked for, is without them."""
    logprobs: Literal["raw", "processed"] | None = None
    """Give the log-probability of each generated token: the model's, or after the filters."""

    def __post_init__(self) -> None:
        for name, default, allowed in _CHECKED:
            value = getattr(self, name)
            if value is not default and value not in allowed:
                raise ValueError(f"{name} must be {allowed}, got {value}")
        if self.logprobs not in (None, "raw", "processed"):
            raise ValueError(f"logprobs must be None, 'raw' or 'processed', got {self.logprobs!r}")
        if self.stop_strings and (
            isinstance(self.stop_strings, str)
            or not all(isinstance(text, str) and text for text in self.stop_strings)
        ):
            raise ValueError(
                f"stop_strings must hold texts that are not empty, got {self.stop_strings!r}"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken without noise."""
        return self.temperature == 0


_CHECKED = tuple(
    (item.name, item.default, RANGES[item.name])
    for item in dataclasses.fields(SamplingParams)
    if item.name in RANGES
)
"""Parameters with a range: name, default, range. Every row is checked, so defaults are skipped."""


def derive_seed(run_seed: int, request_id: str, sample_index: int = 0) -> int:
    """Return the seed of a request without its own: a hash of run seed, id and sample index."""
    text = f"{run_seed}\0{sample_index}\0{request_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & MAX_SEED
