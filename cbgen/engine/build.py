"""Puts an engine together around a loaded model: probe, plan, cache, scheduler, runner."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedModel

from cbgen.engine.cache.kv_cache import KVCache
from cbgen.engine.config import ContinuousBatchingConfig, ModelConfig, WorkloadHints
from cbgen.engine.core import Engine
from cbgen.engine.cpu import native
from cbgen.engine.cpu.best_token import screen_bytes
from cbgen.engine.cpu.int8 import weight_bytes
from cbgen.engine.cpu.packing import can_pack
from cbgen.engine.events import EngineObserver
from cbgen.engine.forward import run_model
from cbgen.engine.memory import free_bytes, free_ram
from cbgen.engine.model.loader import LoadedModel, load_skeleton
from cbgen.engine.model.probe import ModelFacts, probe_model
from cbgen.engine.plan import EnginePlan, PlanFacts, resolve
from cbgen.engine.runner import Forward, Runner
from cbgen.engine.scheduler.policies import make_scheduler
from cbgen.errors import UsageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and what was decided for it."""

    engine: Engine
    plan: EnginePlan
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """What an engine would be, known without its model's weights."""

    loaded: LoadedModel
    """Its model has no weights."""
    plan: EnginePlan
    facts: ModelFacts
    """As they would be with the weights loaded."""
    plan_facts: PlanFacts
    """The free memory is what the weights leave."""


def plan_engine(model: ModelConfig, config: ContinuousBatchingConfig) -> PlannedEngine:
    """Decide everything that `build_engine` would, from config and tokenizer alone.

    Raises:
        UsageError: what `load_model` and `build_engine` would refuse.
    """
    loaded = load_skeleton(model)
    probed = probe_model(loaded.model)
    num_bytes = weight_bytes(loaded.model, loaded.dtype, loaded.packed_dtype, model.quantization)
    if can_pack(loaded.device, loaded.dtype):
        num_bytes += screen_bytes(loaded.model)
    facts = replace(probed, dtype=loaded.dtype, device=loaded.device, weight_bytes=num_bytes)
    free = free_bytes(loaded.device)
    left = free - facts.weight_bytes
    if left <= 0:
        raise UsageError(
            f"the weights take {facts.weight_bytes / 2**30:.1f} GiB in {loaded.dtype}, and "
            f"{free / 2**30:.1f} GiB of {loaded.device} are free"
        )
    numbers = replace(plan_facts(facts), free_bytes=left)
    plan = resolve(config, model.attn_implementation, numbers)
    return PlannedEngine(loaded, plan, facts, numbers)


def build_engine(
    model: PreTrainedModel,
    config: ContinuousBatchingConfig,
    attn_implementation: str = "auto",
    *,
    observer: EngineObserver | None = None,
    hints: WorkloadHints | None = None,
) -> BuiltEngine:
    """Probe a loaded model, decide every size, and put an engine together for it.

    The model must be attached (`model.attach.attached`) while the engine runs.

    Args:
        model: the loaded model.
        config: what was asked for.
        attn_implementation: name of the attention backend, or auto.
        observer: is told what happens in every step.
        hints: what is known of the requests to come.

    Raises:
        UsageError: the model does not obey the hook, or what was asked does not fit the machine.
    """
    facts = probe_model(model)
    plan = resolve(config, attn_implementation, plan_facts(facts), hints)
    engine = assemble_engine(partial(run_model, model), plan, facts.device, observer)
    return BuiltEngine(engine, plan, facts)


def assemble_engine(
    forward: Forward,
    plan: EnginePlan,
    device: torch.device,
    observer: EngineObserver | None = None,
) -> Engine:
    """Allocate cache and rows as planned and return the engine around a forward pass.

    With CBGEN_CHECK=1 in the environment the engine verifies its bookkeeping after every step.
    """
    for warning in plan.warnings:
        logger.warning("%s", warning)
    cache = KVCache(plan.cache, shares_prefixes=plan.shares_prefixes)
    scheduler = make_scheduler(plan, cache, observer)
    runner = Runner(forward, plan, device)
    check = os.environ.get("CBGEN_CHECK") == "1"
    return Engine(scheduler, runner, check=check, observer=observer)


def plan_facts(facts: ModelFacts) -> PlanFacts:
    """Return the numbers that the plan needs of a probed model and its device as it is now."""
    library = native.kernels()
    return PlanFacts(
        device_type=facts.device.type,
        free_bytes=free_bytes(facts.device),
        host_free_bytes=free_ram(),
        layers=facts.layers,
        dtype=str(facts.dtype).removeprefix("torch."),
        vocab_size=facts.vocab_size,
        logits_size=facts.logits_size,
        hidden_size=facts.hidden_size,
        max_context=facts.max_context,
        missing_kernels=native.why_unfit(facts.dtype),
        instruction_set=None if library is None else library.selected(),
    )
