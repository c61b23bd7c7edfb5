"""Workloads of `cbgen bench`: token-id prompts with fixed answer lengths, built in or from a file.

The built-in ones are drawn by a seeded generator, so that a name and a vocabulary mean the same
tokens on every machine. Knows no engine and no torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from cbgen.errors import UsageError


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: its prompt, and exactly how many tokens are generated."""

    prompt: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are submitted together, in this order."""

    name: str
    requests: tuple[BenchRequest, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer of the longest request."""
        return max(len(request.prompt) + request.max_new_tokens for request in self.requests)


WorkloadMaker = Callable[[int], Workload]
"""Vocabulary size to workload."""


class _Draw:
    """Numbers of one seed. `random.Random.random` is the one method that never changes."""

    def __init__(self, seed: str) -> None:
        self._uniform = random.Random(seed).random

    def between(self, low: int, high: int) -> int:
        return low + int(self._uniform() * (high - low + 1))

    def log_between(self, low: int, high: int) -> int:
        return min(high, int(low * ((high + 1) / low) ** self._uniform()))

    def tokens(self, count: int, vocab_size: int) -> tuple[int, ...]:
        return tuple(self.between(0, vocab_size - 1) for _ in range(count))


def _evaluation_set(draw: _Draw, vocab_size: int) -> list[BenchRequest]:
    lengths = [(draw.log_between(16, 512), draw.between(16, 128)) for _ in range(128)]
    return [BenchRequest(draw.tokens(prompt, vocab_size), new) for prompt, new in lengths]


def _one_system_prompt(draw: _Draw, vocab_size: int) -> list[BenchRequest]:
    lengths = [draw.between(32, 64) for _ in range(64)]
    shared = draw.tokens(512, vocab_size)
    return [BenchRequest(shared + draw.tokens(own, vocab_size), 64) for own in lengths]


def _long_answers(draw: _Draw, vocab_size: int) -> list[BenchRequest]:
    return [BenchRequest(draw.tokens(32, vocab_size), 256) for _ in range(32)]


def _long_prompts(draw: _Draw, vocab_size: int) -> list[BenchRequest]:
    return [BenchRequest(draw.tokens(2048, vocab_size), 16) for _ in range(16)]


_FULL: dict[str, Callable[[_Draw, int], list[BenchRequest]]] = {
    "W1": _evaluation_set,
    "W2": _one_system_prompt,
    "W3": _long_answers,
    "W4": _long_prompts,
}
_PARTS: dict[str, tuple[str, int, int | None]] = {
    "W1h": ("W1", 64, None),
    "W1s": ("W1", 32, None),
    "W2h": ("W2", 32, 32),
    "W3h": ("W3", 32, 96),
    "W4h": ("W4", 6, None),
}
"""Of which workload, how many of its first requests, how many new tokens (None = as there)."""

WORKLOAD_NAMES = tuple(sorted((*_FULL, *_PARTS)))


def make_workload(name: str, vocab_size: int) -> Workload:
    """Return a built-in workload with token ids in [0, vocab_size).

    Raises:
        KeyError: there is none of that name.
    """
    full, num_requests, max_new_tokens = _PARTS.get(name, (name, None, None))
    requests = _FULL[full](_Draw(f"cbgen bench {full}"), vocab_size)[:num_requests]
    if max_new_tokens is not None:
        requests = [BenchRequest(request.prompt, max_new_tokens) for request in requests]
    return Workload(name, tuple(requests))


def find_workload(name_or_path: str) -> WorkloadMaker:
    """Return what makes the workload of that name, or of that file, for a vocabulary.

    A file is read and checked now; its token ids are checked when the vocabulary is known.

    Args:
        name_or_path: one of `WORKLOAD_NAMES`, else a JSON file: `{"name": ..., "requests":
            [{"prompt": [token ids], "max_new": tokens}, ...]}`; other fields are not read.

    Raises:
        UsageError: there is neither, or the file holds something else.
    """
    if name_or_path in WORKLOAD_NAMES:
        return lambda vocab_size: make_workload(name_or_path, vocab_size)
    workload = read_workload(name_or_path)

    def checked(vocab_size: int) -> Workload:
        for index, request in enumerate(workload.requests):
            if (largest := max(request.prompt)) >= vocab_size:
                raise UsageError(
                    f"--workload {name_or_path}: requests[{index}].prompt holds token {largest}, "
                    f"and the model has tokens 0 to {vocab_size - 1}"
                )
        return workload

    return checked


def read_workload(path: str) -> Workload:
    """Read a workload file.

    Raises:
        UsageError: it cannot be read, or holds no workload; the text names the place.
    """
    place = f"--workload {path}"
    try:
        with open(path, "rb") as file:
            content = orjson.loads(file.read())
    except OSError as error:
        names = ", ".join(WORKLOAD_NAMES)
        raise UsageError(
            f"{place}: cannot be read: {error.strerror}; built in are {names}"
        ) from error
    except ValueError as error:
        raise UsageError(f"{place}: is no JSON: {error}") from error
    requests = content.get("requests") if isinstance(content, dict) else None
    if not isinstance(requests, list) or not requests:
        raise UsageError(f'{place}: expected an object with a list "requests" that is not empty')
    name = content.get("name", path)
    if not isinstance(name, str):
        raise UsageError(f'{place}: "name" must be a string, got {name!r}')
    return Workload(
        name,
        tuple(_request(item, f"{place}: requests[{index}]") for index, item in enumerate(requests)),
    )


def _request(item: Any, place: str) -> BenchRequest:  # noqa: ANN401  whatever a file holds
    if not isinstance(item, dict):
        raise UsageError(f"{place} must be an object, got {type(item).__name__}")
    prompt, max_new_tokens = item.get("prompt"), item.get("max_new")
    if not isinstance(prompt, list) or not prompt or not all(map(_is_token, prompt)):
        raise UsageError(f'{place}: "prompt" must be a list of token ids that is not empty')
    if not isinstance(max_new_tokens, int) or not _is_token(max_new_tokens) or not max_new_tokens:
        raise UsageError(f'{place}: "max_new" must be at least 1, got {max_new_tokens!r}')
    return BenchRequest(tuple(prompt), max_new_tokens)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
