"""One run of one peer: starts its adapter, watches its memory, checks what it made.

A run is a JSON object, as README.md describes it. What goes wrong in a peer is the run's `error`;
nothing is raised for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.adapters.job import descendants
from benchmarks.peers.config import ADAPTERS, Peer
from cbgen.bench.workloads import BenchRequest, Workload

Run = dict[str, Any]
Outputs = list[list[int]]

WARM_UP = tuple(BenchRequest(tuple(range(start, start + 24)), 4) for start in range(100, 200, 25))
"""Requests that no workload begins like, so that nothing of them is found in a cache."""

_ROOT = Path(__file__).parents[2]
_MIB = 2**20
_WATCH_EVERY_S = 0.2
_LOG_LINES = 8


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What is the same for all runs.

    Attributes:
        threads: threads that each peer computes with.
        timeout_s: seconds after which a run is ended.
        logs: folder for what the peers say.
    """

    threads: int
    timeout_s: float
    logs: Path


def run_peer(peer: Peer, workload: Workload, where: Circumstances) -> tuple[Run, Outputs]:
    """Run a workload once, in a process of its own.

    Returns:
        The measured run, and the generated tokens of each request; without them if it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder) / "job.json", Path(folder) / "result.json"
        job.write_text(json.dumps(_job(peer, workload, where.threads, result)))
        log = where.logs / f"{peer.name}-{workload.name}.log".replace("/", "-").replace(" ", "-")
        started = time.perf_counter()
        failure, peak = _watch(peer, job, log, where)
        process_s = time.perf_counter() - started
        run: Run = {
            "peer": peer.name,
            "workload": workload.name,
            "threads": where.threads,
            "ended": time.strftime("%Y-%m-%dT%H:%M:%S"),
        }
        if failure is None and not result.exists():
            failure = "no result was written"
        if failure is not None:
            return run | {"error": f"{failure}; {log} ends: {_last_lines(log)}"}, []
        measured = json.loads(result.read_text())
    outputs: Outputs = measured.pop("outputs")
    if wrong := wrong_lengths(workload, outputs):
        return run | {"error": wrong}, []
    num_output = sum(map(len, outputs))
    return run | {
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": num_output,
        "output_tokens_per_s": round(num_output / measured["seconds"], 2),
        **{name: round(value, 3) for name, value in measured.items()},
        "process_seconds": round(process_s, 3),
        "peak_anonymous_mb": round(peak.anonymous / _MIB, 1),
        "peak_resident_mb": round(peak.resident / _MIB, 1),
    }, outputs


def wrong_lengths(workload: Workload, outputs: Outputs) -> str | None:
    """Say where the outputs are not as long as the workload wants them; None if they are."""
    if len(outputs) != len(workload.requests):
        return f"{len(outputs)} outputs for {len(workload.requests)} requests"
    for index, (request, tokens) in enumerate(zip(workload.requests, outputs, strict=True)):
        if len(tokens) != request.max_new_tokens:
            return f"request {index} has {len(tokens)} tokens, not {request.max_new_tokens}"
    return None


def equal_share(outputs: Outputs, reference: Outputs) -> float:
    """Return the share of requests whose tokens are those of the reference, every one."""
    same = [mine == theirs for mine, theirs in zip(outputs, reference, strict=True)]
    return round(sum(same) / len(same), 4)


def _job(peer: Peer, workload: Workload, threads: int, result: Path) -> dict[str, Any]:
    return {
        "model": str(peer.model),
        "threads": threads,
        "options": peer.options,
        "fill_cache_first": peer.fill_cache_first,
        "warm_up": _as_json(WARM_UP),
        "requests": _as_json(workload.requests),
        "result": str(result),
    }


def _as_json(requests: Sequence[BenchRequest]) -> list[dict[str, Any]]:
    return [{"prompt": item.prompt, "max_new": item.max_new_tokens} for item in requests]


@dataclass(slots=True)
class _Peak:
    """Bytes of the process and its children together, at most."""

    anonymous: int = 0
    resident: int = 0

    def look(self, pid: int) -> None:
        found = [_memory_of(member) for member in (pid, *descendants(pid))]
        self.anonymous = max(self.anonymous, sum(anonymous for anonymous, _ in found))
        self.resident = max(self.resident, sum(resident for _, resident in found))


def _watch(peer: Peer, job: Path, log: Path, where: Circumstances) -> tuple[str | None, _Peak]:
    """Run the adapter to its end; return why it failed, if it did, and its most memory."""
    peak = _Peak()
    deadline = time.monotonic() + where.timeout_s
    with open(log, "w") as file:
        process = subprocess.Popen(
            [peer.python, peer.adapter, job],
            env=_environment(peer, where.threads),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its children can be ended with it
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(_WATCH_EVERY_S)
                    return None if code == 0 else f"exit code {code}", peak
                peak.look(process.pid)
                if time.monotonic() > deadline:
                    return f"not done after {where.timeout_s:.0f} s", peak
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _environment(peer: Peer, threads: int) -> dict[str, str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **peer.env,
    }
    # cbgen is the one of this checkout, unless the configuration's PYTHONPATH names another.
    paths = (str(ADAPTERS), environment.get("PYTHONPATH", ""), str(_ROOT))
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _memory_of(pid: int) -> tuple[int, int]:
    """Return anonymous and resident bytes of a process; none of one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
    return kib.get("RssAnon", 0) * 1024, kib.get("VmRSS", 0) * 1024


def _last_lines(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-_LOG_LINES:]) or "(nothing)"
