"""A runner that computes nothing and remembers everything: what each slot of the cache holds.

A key is represented by the tokens up to its own, so it tells exactly which sequence it belongs to.
Every step verifies that each query finds the keys that it must see, in every layer group. The next
token is a function of the whole sequence, so a wrong key would also be a wrong answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from cbgen.engine.cache.groups import AttentionSpan
from cbgen.engine.request import Request
from cbgen.engine.step import SampledTokens, ScheduledBatch, ScheduledRequest, StepResult

VOCAB_SIZE = 128


def extend_keys(keys: list[bytes], token_ids: Sequence[int]) -> None:
    """Append what stands for the key of each token that has none yet; it depends on all before."""
    for token_id in token_ids[len(keys) :]:
        before = keys[-1] if keys else b""
        keys.append(hashlib.blake2b(b"%d" % token_id, key=before, digest_size=8).digest())


def next_token(keys: Sequence[bytes]) -> int:
    """Return the token that follows those with these keys."""
    return 1 + keys[-1][0] % (VOCAB_SIZE - 1)


def shadow_answer(request: Request) -> list[int]:
    """Return the answer of a request that has the engine for itself."""
    token_ids = list(request.prompt_ids)
    keys: list[bytes] = []
    assert request.params.max_new_tokens is not None
    for _ in range(request.params.max_new_tokens):
        extend_keys(keys, token_ids)
        token_ids.append(next_token(keys))
        if token_ids[-1] in request.params.stop_token_ids:
            break
    return token_ids[len(request.prompt_ids) :]


class FinishedStep(NamedTuple):
    """A step whose result is there already."""

    finished: StepResult

    def result(self) -> StepResult:
        return self.finished


class ShadowRunner:
    """Owns the shadows of device and host blocks, and of the rows.

    Attributes:
        num_tokens: tokens run so far.
    """

    def __init__(self, page_size: int, spans: Sequence[AttentionSpan] = (AttentionSpan(),)) -> None:
        self._page_size = page_size
        self._spans = tuple(spans)
        self._device: dict[int, list[bytes]] = {}
        self._host: dict[int, list[bytes]] = {}
        self._tokens: dict[int, list[int]] = {}
        self._keys: dict[int, list[bytes]] = {}
        self._tables: dict[tuple[int, int], dict[int, int]] = {}
        self.num_tokens = 0

    def launch(self, batch: ScheduledBatch) -> FinishedStep:
        """Run one step and verify what it reads."""
        for item in batch.admitted:
            self._tokens[item.row] = [*item.prompt_ids, *item.generated_tokens]
            self._keys[item.row] = []
            for group in range(len(self._spans)):
                self._tables[item.row, group] = {}
        self._move(batch)
        for row, group, first, block_ids in batch.new_blocks:
            self._tables[row, group].update(enumerate(block_ids, first))
        assert batch.num_tokens == sum(item.num_tokens for item in batch.requests)
        self.num_tokens += batch.num_tokens
        for item in batch.requests:
            self._write(item)
        for item in batch.requests:
            self._verify(item)
        samples = []
        for item in batch.requests:
            if item.num_samples:
                tokens = self._tokens[item.row]
                assert item.start + item.num_tokens == len(tokens)
                tokens.append(next_token(self._keys[item.row]))
                samples.append(SampledTokens((tokens[-1],), (-0.5,)))
        return FinishedStep(StepResult(tuple(samples)))

    def _move(self, batch: ScheduledBatch) -> None:
        for swap in batch.swaps_out:
            self._host[swap.host_block] = list(self._device[swap.device_block])
        read = [self._page(copy.source)[: copy.num_tokens] for copy in batch.block_copies]
        for copy, keys in zip(batch.block_copies, read, strict=True):
            self._page(copy.target)[: copy.num_tokens] = keys
        for swap in batch.swaps_in:
            self._device[swap.device_block] = list(self._host[swap.host_block])

    def _page(self, block: int) -> list[bytes]:
        return self._device.setdefault(block, [b"never written"] * self._page_size)

    def _write(self, item: ScheduledRequest) -> None:
        keys = self._keys[item.row]
        extend_keys(keys, self._tokens[item.row])
        for position in range(item.start, item.start + item.num_tokens):
            key = keys[position]
            for group in range(len(self._spans)):
                page, offset = divmod(position, self._page_size)
                self._page(self._tables[item.row, group][page])[offset] = key + bytes([group])

    def _verify(self, item: ScheduledRequest) -> None:
        keys = self._keys[item.row]
        end = item.start + item.num_tokens
        for group, span in enumerate(self._spans):
            # The first query of the chunk sees the earliest key; windows only move on.
            for position in range(span.first_key(item.start), end):
                page, offset = divmod(position, self._page_size)
                found = self._page(self._tables[item.row, group][page])[offset]
                assert found == keys[position] + bytes([group]), (
                    f"{item.request_id} finds another key at position {position} of group {group}"
                )
