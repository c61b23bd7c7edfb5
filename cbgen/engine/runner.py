"""Everything that runs on the device happens here: inputs, forward pass, sampling.

    launch(ScheduledBatch) -> DrawnTokens, and its result() -> StepResult

The runner decides nothing; it applies what the batch says, in the order of its fields. `launch`
only hands work to the device; `result` is where the host waits for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cbgen.engine.attention.backends import backend_class
from cbgen.engine.attention.base import AttentionBackend
from cbgen.engine.attention.context import PagedLayers, PagedStep, forward_context
from cbgen.engine.batch import Rows
from cbgen.engine.plan import EnginePlan
from cbgen.engine.sampling.sampler import NOTHING_DRAWN, DrawnTokens, Sampler
from cbgen.engine.sampling.scores import Scores
from cbgen.engine.step import ScheduledBatch
from cbgen.engine.storage import KVStorage

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Scores]
"""(token_ids [1, T], position_ids [1, T], logit_indices [s]) -> scores of s rows"""


class Runner:
    """Owns the device side of an engine: model, pages, rows and sampler.

    Attributes:
        storage: the pages of all layers.
    """

    def __init__(self, forward: Forward, plan: EnginePlan, device: torch.device) -> None:
        """Allocate pages and rows as planned.

        Args:
            forward: runs the model.
            plan: every size.
            device: where the model is.
        """
        self.storage = KVStorage(plan.cache, device)
        self._forward = forward
        self._backend: AttentionBackend = backend_class(plan.attn_implementation)()
        self._rows = Rows(
            plan.cache, plan.max_requests, table_blocks=plan.table_blocks, device=device
        )
        self._sampler = Sampler(plan.max_requests, plan.logits_size, device)
        group_of = {
            layer.index: number
            for number, group in enumerate(plan.cache.groups)
            for layer in group.layers
        }
        self._layers = PagedLayers(self.storage.layers, group_of)

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> DrawnTokens:
        """Start one step without waiting for the device.

        Raises:
            NotImplementedError: the batch holds what no scheduler of this version makes.
        """
        if batch.state_resets:
            raise NotImplementedError("state resets have no owner in this version")
        self._rows.admit(batch.admitted)
        self._sampler.admit(batch.admitted)
        self.storage.swap_out(batch.swaps_out)
        self.storage.copy_blocks(batch.block_copies)
        self.storage.swap_in(batch.swaps_in)
        self._rows.extend_block_tables(batch.new_blocks)
        if not batch.requests:
            return NOTHING_DRAWN
        inputs = self._rows.gather(batch)
        context = PagedStep(
            inputs.position_ids[0],
            self._layers,
            inputs.attention,
            self._backend,
            fuses_layers=self._backend.serves_decoder,
        )
        with forward_context(context):
            scores = self._forward(inputs.token_ids, inputs.position_ids, inputs.logit_indices)
        sampled = [item for item in batch.requests if item.num_samples]
        if not sampled:
            return NOTHING_DRAWN
        drawn = self._sampler.draw(scores, sampled)
        self._rows.store_sampled(inputs.sampled_rows, drawn.token_ids)
        return drawn
