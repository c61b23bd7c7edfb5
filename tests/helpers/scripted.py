"""A model whose logits are chosen by the test, in an engine without attention layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from cbgen.engine.build import assemble_engine
from cbgen.engine.core import Engine
from cbgen.engine.events import EngineObserver
from cbgen.engine.sampling.scores import Logits
from tests.helpers.engine import make_plan, make_shape

Script = Callable[[int, int], Mapping[int, float]]
"""(token id, its position) -> the logits that differ from 0."""


def successor(token_id: int, position: int) -> Mapping[int, float]:
    """Make the next number the best token: 3 is followed by 4."""
    return {token_id + 1: 10.0}


class ScriptedModel:
    """A forward function with the logits of a script; it counts its steps from 1.

    `before_step` is called with the number of each step before it runs: it may wait, or raise.
    """

    def __init__(
        self,
        script: Script = successor,
        *,
        vocab_size: int = 32,
        before_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.script = script
        self.vocab_size = vocab_size
        self.before_step = before_step
        self.num_steps = 0
        self.tokens_per_step: list[int] = []

    def __call__(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, logit_indices: torch.Tensor
    ) -> Logits:
        self.num_steps += 1
        self.before_step(self.num_steps)
        self.tokens_per_step.append(token_ids.shape[1])
        logits = torch.zeros(len(logit_indices), self.vocab_size)
        for row, index in enumerate(logit_indices.tolist()):
            chosen = self.script(int(token_ids[0, index]), int(position_ids[0, index]))
            for token_id, value in chosen.items():
                logits[row, token_id % self.vocab_size] = value
        return Logits(logits)


def make_scripted_engine(
    model: ScriptedModel,
    observer: EngineObserver | None = None,
    *,
    page_size: int = 4,
    num_blocks: int = 64,
    **changes,
) -> Engine:
    """Return an engine over a scripted model; `changes` are fields of EnginePlan."""
    plan = make_plan(
        **({"vocab_size": model.vocab_size, "logits_size": model.vocab_size} | changes)
    )
    shape = make_shape(num_blocks, page_size, max_batch_tokens=plan.max_batch_tokens)
    return assemble_engine(model, replace(plan, cache=shape), torch.device("cpu"), observer)
