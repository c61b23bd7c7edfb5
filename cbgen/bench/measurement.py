"""Runs a workload of token ids through the engine and measures it.

The engine is the one that a job has: same loading, same plan, same thread. What is timed lies
between the submission of all requests and the last answer; loading and one small request that warms
everything up come before it, measuring the machine comes after it. Rows, text and the recipe's
generation settings play no part: every request is greedy and ends at its length alone.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cbgen.bench.roofline import StepWork, linear_sizes, measure_machine, roofline_seconds
from cbgen.bench.workloads import Workload, WorkloadMaker
from cbgen.engine.build import BuiltEngine, build_engine
from cbgen.engine.cpu.decoder import take_part_seconds
from cbgen.engine.events import StepTimes
from cbgen.engine.loop import EngineLoop
from cbgen.engine.model.attach import attached
from cbgen.engine.model.loader import load_model
from cbgen.engine.request import FinishReason, GenerationOutput, Request
from cbgen.engine.sampling.params import SamplingParams
from cbgen.errors import EngineError, UsageError
from cbgen.job.channel import Channel
from cbgen.job.gc_pauses import gc_ignores_existing_objects
from cbgen.recipe.schema import Recipe

_WARM_UP_TOKENS = 4
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What was measured.

    Attributes:
        summary: the JSON object that `cbgen bench` prints.
        outputs: generated token ids of each request, in the order of the workload.
    """

    summary: dict[str, Any]
    outputs: list[list[int]]


class StepRecorder:
    """An engine observer that keeps what each step took and ran; called on the engine's thread.

    Attributes:
        schedule_s: seconds of all steps, as are `execute_s` and `update_s`.
        steps: what each step ran.
    """

    def __init__(self) -> None:
        self.watch(())

    def watch(self, requests: Sequence[Request]) -> None:
        """Begin anew with these requests, before they are submitted."""
        self.schedule_s = self.execute_s = self.update_s = 0.0
        self.steps: list[StepWork] = []
        self._unfinished = {request.request_id: request for request in requests}
        self._num_computed = dict.fromkeys(self._unfinished, 0)
        self._num_generated = 0
        self._num_ended_generated = 0

    def admitted(self, row: int, request_id: str, num_tokens: int) -> None:
        """Take what the cache has of the request as computed."""
        request = self._unfinished.get(request_id)
        if request is not None:
            self._num_computed[request_id] = request.num_known_tokens - num_tokens

    def decoding(self, row: int) -> None:
        """Do nothing."""

    def preempted(self, row: int, num_computed_tokens: int) -> None:
        """Do nothing: `admitted` tells what is left of it."""

    def ended(self, row: int, reason: str, num_generated_tokens: int) -> None:
        """Do nothing."""

    def stepped(self, times: StepTimes) -> None:
        """Add up the times and see how far each request has come."""
        self.schedule_s += times.scheduled - times.started
        self.execute_s += times.executed - times.scheduled
        self.update_s += times.updated - times.executed
        spans = []
        num_generated = self._num_ended_generated
        for request_id, request in list(self._unfinished.items()):
            num_generated += len(request.generated_tokens)
            start, end = self._num_computed[request_id], request.num_computed_tokens
            if request.is_finished:
                end = request.num_known_tokens - 1  # the last token is drawn and not run
                del self._unfinished[request_id]
                self._num_ended_generated += len(request.generated_tokens)
            if end > start:
                spans.append((start, end))
                self._num_computed[request_id] = end
        num_logits, self._num_generated = num_generated - self._num_generated, num_generated
        self.steps.append(StepWork(tuple(spans), num_logits))


@dataclass(frozen=True, slots=True)
class _Timed:
    """A run, as the clocks and counters saw it."""

    seconds: float
    other_cpu_s: float | None
    counts: Mapping[str, int]
    """By field of `StepStats`: what was counted during the run."""
    forward_s: Mapping[str, float]
    outputs: list[list[int]]


def run_bench(
    recipe: Recipe, make_workload: WorkloadMaker, *, on_running: Callable[[], None] = lambda: None
) -> BenchResult:
    """Load the recipe's model, run a workload through its engine, and measure the machine.

    Args:
        recipe: the checked recipe; `model` and `continuous_batching_config` count.
        make_workload: gives the workload for the model's vocabulary.
        on_running: called once, when the model is loaded and the run begins.

    Raises:
        UsageError: model or settings are wrong, or the workload does not fit the engine.
        EngineError: the engine failed.
    """
    started = time.perf_counter()
    loaded = load_model(recipe.model)
    recorder = StepRecorder()
    with attached(loaded.model):
        built = build_engine(
            loaded.model,
            recipe.continuous_batching_config,
            recipe.model.attn_implementation,
            observer=recorder,
        )
        load_seconds = time.perf_counter() - started
        workload = make_workload(built.facts.vocab_size)
        room = built.plan.longest_request
        if workload.longest > room:
            raise UsageError(
                f"workload {workload.name} has a request of {workload.longest} tokens, prompt and "
                f"answer together, and the engine has room for {room}: take another workload, or a "
                "model with a longer context or a larger cache"
            )
        on_running()
        timed = _run(built, loaded.model, recorder, workload)
    peak_bytes = _peak_bytes(built.facts.device)
    sizes = linear_sizes(loaded.model)
    rates = measure_machine(built.facts.device, built.facts.dtype)
    roofline = (
        None if sizes is None else roofline_seconds(recorder.steps, sizes, built.facts, rates)
    )
    num_prompt, num_output = workload.num_prompt_tokens, sum(map(len, timed.outputs))
    step_s = recorder.schedule_s + recorder.execute_s + recorder.update_s
    summary = {
        "workload": workload.name,
        "requests": len(workload.requests),
        "seconds": round(timed.seconds, 4),
        "load_seconds": round(load_seconds, 4),
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "output_tokens_per_s": round(num_output / timed.seconds, 2),
        "total_tokens_per_s": round((num_prompt + num_output) / timed.seconds, 2),
        "roofline_seconds": None if roofline is None else round(roofline, 4),
        "peak_memory_mb": round(peak_bytes / _MIB, 1),
        "parts": {  # the seconds add up to all of them
            "schedule_seconds": round(recorder.schedule_s, 4),
            "execute_seconds": round(recorder.execute_s, 4),
            "update_seconds": round(recorder.update_s, 4),
            "rest_seconds": round(timed.seconds - step_s, 4),
            "steps": timed.counts["num_steps"],
            "run_tokens": timed.counts["num_computed_tokens"],
            "cached_tokens": timed.counts["num_cached_tokens"],
            "recomputed_tokens": timed.counts["num_recomputed_tokens"],
            "preemptions": timed.counts["num_preemptions"],
        },
        "forward": {f"{name}_seconds": round(s, 4) for name, s in timed.forward_s.items()},
        "machine": {
            "device": str(built.facts.device),
            "dtype": str(built.facts.dtype).removeprefix("torch."),
            "attn_implementation": built.plan.attn_implementation,
            "threads": torch.get_num_threads(),
            "gflop_per_s": round(rates.flop_per_s / 1e9, 1),
            "gb_per_s": round(rates.bytes_per_s / 1e9, 1),
            "other_cpu_seconds": None if timed.other_cpu_s is None else round(timed.other_cpu_s, 2),
        },
    }
    return BenchResult(summary, timed.outputs)


def _run(
    built: BuiltEngine, model: PreTrainedModel, recorder: StepRecorder, workload: Workload
) -> _Timed:
    answers: Channel[GenerationOutput] = Channel()
    loop = EngineLoop(built.engine, answers)
    loop.start()
    try:
        with gc_ignores_existing_objects():
            loop.submit([_request("warm-up", [0] * _WARM_UP_TOKENS, _WARM_UP_TOKENS)])
            answers.take()
            loop.pause()
            loop.resume()  # from a pause on, cached prefixes are forgotten
            before = loop.stats()
            requests = [
                _request(str(index), item.prompt, item.max_new_tokens)
                for index, item in enumerate(workload.requests)
            ]
            recorder.watch(requests)
            with _forward_seconds(model) as forward_s:
                cpu_before = _other_cpu_seconds()
                started = time.perf_counter()
                loop.submit(requests)
                outputs: dict[str, GenerationOutput] = {}
                while len(outputs) < len(requests):
                    outputs.update((output.request_id, output) for output in answers.take())
                seconds = time.perf_counter() - started
                cpu_after = _other_cpu_seconds()
    finally:
        loop.stop(hard_stop=True)
    for output in outputs.values():
        if output.finish_reason is not FinishReason.LENGTH:
            raise EngineError(
                f"request {output.request_id} of workload {workload.name} ended with "
                f"{output.finish_reason}: {output.error}"
            )
    old = asdict(before)
    return _Timed(
        seconds,
        None if cpu_before is None or cpu_after is None else max(0.0, cpu_after - cpu_before),
        {name: number - old[name] for name, number in asdict(loop.stats()).items()},
        forward_s,
        [outputs[request.request_id].generated_tokens for request in requests],
    )


def _request(request_id: str, prompt: Sequence[int], max_new_tokens: int) -> Request:
    return Request(request_id, list(prompt), SamplingParams(max_new_tokens=max_new_tokens))


@contextmanager
def _forward_seconds(model: PreTrainedModel) -> Iterator[dict[str, float]]:
    """Give the seconds of the parts of forward passes during the block, complete at its end.

    Those of decoder layers are there only where the layers are fused. On a GPU kernels run behind
    the program, and what is seen here is not their time.
    """
    seconds: dict[str, float] = {}
    head_s = head_started = 0.0

    def start(*_arguments: object) -> None:
        nonlocal head_started
        head_started = time.perf_counter()

    def end(*_arguments: object) -> None:
        nonlocal head_s
        head_s += time.perf_counter() - head_started

    take_part_seconds(model)  # what the warm-up took
    head = model.get_output_embeddings()
    hooks = []
    if isinstance(head, nn.Module):
        hooks = [head.register_forward_pre_hook(start), head.register_forward_hook(end)]
    try:
        yield seconds
    finally:
        for hook in hooks:
            hook.remove()
    seconds.update(take_part_seconds(model))
    seconds["head"] = seconds.get("head", 0.0) + head_s


def _peak_bytes(device: torch.device) -> int:
    """Return the most memory that was in use: of a GPU by torch, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(peak) * 1024


def _other_cpu_seconds() -> float | None:
    """Return the CPU time of all other processes so far; None if the system does not tell."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0]
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, softirq = map(int, first.split()[1:8])
    own = os.times()
    all_s = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    return all_s - (own.user + own.system + own.children_user + own.children_system)
