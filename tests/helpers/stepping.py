"""Drives a runner by hand: steps as a test wants them, blocks given out where a test wants them.

Sequences are known beforehand, so every step's logits can be compared with those of a plain forward
pass. Blocks that nobody holds are filled with NaN: reading one shows in the logits.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from cbgen.engine.cache.groups import LayerGroup, group_layers
from cbgen.engine.cache.shape import CacheShape
from cbgen.engine.forward import run_model
from cbgen.engine.model.attach import attached
from cbgen.engine.model.probe import probe_model
from cbgen.engine.runner import Runner
from cbgen.engine.sampling.params import SamplingParams
from cbgen.engine.sampling.scores import Scores
from cbgen.engine.step import (
    AdmittedRow,
    BlockCopy,
    BlockSwap,
    NewBlocks,
    ScheduledBatch,
    ScheduledRequest,
)
from tests.helpers.engine import make_plan

CPU = torch.device("cpu")
NAN = float("nan")


class Stepper:
    """Some sequences, a row each, and the device side of an engine on a model."""

    def __init__(
        self,
        model: PreTrainedModel,
        sequences: Sequence[Sequence[int]],
        *,
        attention: str = "eager",
        page_size: int = 4,
        num_blocks: int = 64,
        num_host_blocks: int = 0,
        seed: int = 0,
        most_logits: int | None = None,
    ) -> None:
        self.model = model
        self.most_logits = most_logits
        """Logits that a step asks for in each row, of its last tokens; None = of all."""
        self.sequences = sequences
        self.page_size = page_size
        self.groups: tuple[LayerGroup, ...] = group_layers(probe_model(model).layers)
        plan = make_plan(
            CacheShape(page_size, self.groups).sized(num_blocks, 64, num_host_blocks),
            attn_implementation=attention,
            max_requests=len(sequences),
            max_batch_tokens=64,
            max_context=64 * page_size,
            vocab_size=model.config.vocab_size,
            logits_size=model.config.vocab_size,
        )
        self.runner = Runner(self._forward, plan, CPU)
        self.storage = self.runner.storage
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.poison(self.free)
        self.tables: list[list[dict[int, int]]] = [[{} for _ in self.groups] for _ in sequences]
        """For each row and group: logical block -> block."""
        self.computed = [0] * len(sequences)
        self.logits = torch.empty(0)

    def _forward(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, logit_indices: torch.Tensor
    ) -> Scores:
        with attached(self.model):
            scores = run_model(self.model, token_ids, position_ids, logit_indices)
            self.logits = scores.logits()
        return scores

    def poison(self, blocks: Sequence[int]) -> None:
        for group in self.groups:
            for layer in group.layers:
                cache = self.storage.layers[layer.index]
                cache.keys[list(blocks)] = NAN
                cache.values[list(blocks)] = NAN

    def advance(self, table: dict[int, int], first: int, stop: int) -> list[tuple[int, int]]:
        """Give back blocks before `first`, take blocks up to `stop`; return those that are new."""
        gone = [table.pop(logical) for logical in list(table) if logical < first]
        self.poison(gone)
        self.free = gone + self.free
        new = [(logical, self.free.pop()) for logical in range(first, stop) if logical not in table]
        table.update(new)
        return new

    def step(
        self,
        counts: Mapping[int, int],
        *,
        swaps_out: Sequence[BlockSwap] = (),
        swaps_in: Sequence[BlockSwap] = (),
        block_copies: Sequence[BlockCopy] = (),
    ) -> dict[int, torch.Tensor]:
        """Run `counts[row]` tokens of each row; return row -> logits [tokens, vocab]."""
        admitted, new_blocks, requests = [], [], []
        most = max(counts.values()) if self.most_logits is None else self.most_logits
        num_logits = {row: min(count, most) for row, count in counts.items()}
        for row, count in counts.items():
            start = self.computed[row]
            if start == 0:
                admitted.append(AdmittedRow(row, self.sequences[row], SamplingParams()))
            for number, group in enumerate(self.groups):
                first = group.span.first_key(start) // self.page_size
                stop = -(-(start + count) // self.page_size)
                for logical, block in self.advance(self.tables[row][number], first, stop):
                    new_blocks.append(NewBlocks(row, number, logical, (block,)))
            requests.append(
                ScheduledRequest(row, 1, str(row), start, count, num_logits=num_logits[row])
            )
            self.computed[row] += count
        self.runner.launch(
            ScheduledBatch(
                step=1,
                admitted=tuple(admitted),
                swaps_out=tuple(swaps_out),
                swaps_in=tuple(swaps_in),
                block_copies=tuple(block_copies),
                new_blocks=tuple(new_blocks),
                requests=tuple(requests),
                num_tokens=sum(counts.values()),
            )
        )
        return dict(zip(counts, self.logits.split(list(num_logits.values())), strict=True))

    def run(self, choose: random.Random, most_tokens: int) -> list[torch.Tensor]:
        """Run all sequences to their ends in random pieces; return the logits of each."""
        parts: list[list[torch.Tensor]] = [[] for _ in self.sequences]
        while True:
            left = [
                len(ids) - done for ids, done in zip(self.sequences, self.computed, strict=True)
            ]
            rows = [row for row, count in enumerate(left) if count]
            if not rows:
                return [torch.cat(part) for part in parts]
            choose.shuffle(rows)
            counts = {
                row: min(left[row], choose.choice([1, choose.randint(1, most_tokens)]))
                for row in rows[: choose.randint(1, len(rows))]
            }
            for row, logits in self.step(counts).items():
                parts[row].append(logits)
