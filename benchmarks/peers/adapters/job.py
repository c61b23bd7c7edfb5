"""The adapter's side of one run: reads the job, loads, warms up, times, writes the result.

Runs in the Python of a peer, which need not have cbgen: nothing but the standard library. What an
adapter does is said in two functions, `load` and `generate`; everything that must be the same for
all peers is here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

State = TypeVar("State")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Request:
    """One request: its prompt, and exactly how many tokens are to be generated."""

    prompt: list[int]
    max_new_tokens: int


@dataclass(frozen=True)
class Job:
    """What an adapter is told.

    Attributes:
        model: path of the model, as the configuration names it.
        threads: threads that the peer may compute with.
        longest: tokens of prompt and answer of the longest request.
        options: the adapter's options, the ones that the configuration leaves out included.
    """

    model: str
    threads: int
    longest: int
    options: dict[str, Any]


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of CPU so far: of all processes, of this one and its children, and stolen ones.

    Stolen is what the host of a virtual machine gave to others while this machine had work.
    """

    everybody: float
    own: float
    stolen: float


def perform(
    options: dict[str, Any],
    load: Callable[[Job], State],
    generate: Callable[[State, list[Request]], Sequence[Sequence[int]]],
) -> None:
    """Do the job whose file the command line names, and write its result.

    Args:
        options: every option that the adapter knows, with its default.
        load: makes the model ready.
        generate: returns the new tokens of each request, in their order: greedy, no
            end-of-sequence token ends a request.

    Raises:
        SystemExit: the job has an option that the adapter does not know.
    """
    given = json.loads(Path(sys.argv[1]).read_text())
    if unknown := sorted(given["options"].keys() - options.keys()):
        sys.exit(f"unknown options {unknown}; this adapter knows {sorted(options)}")
    requests, warm_up = (
        [Request(item["prompt"], item["max_new"]) for item in given[name]]
        for name in ("requests", "warm_up")
    )
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    job = Job(given["model"], given["threads"], longest, {**options, **given["options"]})

    started = time.perf_counter()
    state = load(job)
    loaded = time.perf_counter()
    generate(state, warm_up)
    cpu_before, begun = cpu_times(), time.perf_counter()
    if given["fill_cache_first"]:
        generate(state, [replace(requests[0], max_new_tokens=1)])
    outputs = generate(state, requests)
    ended, cpu_after = time.perf_counter(), cpu_times()

    own_s = cpu_after.own - cpu_before.own
    result = {
        "seconds": ended - begun,
        "load_seconds": loaded - started,
        "warm_up_seconds": begun - loaded,
        "own_cpu_seconds": own_s,
        "other_cpu_seconds": max(0.0, cpu_after.everybody - cpu_before.everybody - own_s),
        "stolen_cpu_seconds": cpu_after.stolen - cpu_before.stolen,
        "outputs": [list(map(int, tokens)) for tokens in outputs],
    }
    Path(given["result"]).write_text(json.dumps(result))


def cpu_times() -> CpuTimes:
    """Read the clocks of the system and of this process with its children (Linux)."""
    with open("/proc/stat") as file:
        fields = [int(text) / _TICKS_PER_S for text in file.readline().split()[1:9]]
    user, nice, system, _idle, _wait, irq, softirq, stolen = fields
    own = os.times()
    own_s = own.user + own.system + own.children_user + own.children_system
    for pid in descendants(os.getpid()):
        own_s += _cpu_seconds_of(pid)
    return CpuTimes(user + nice + system + irq + softirq, own_s, stolen)


def descendants(pid: int) -> Iterator[int]:
    """Yield the ids of the running children of a process, and of theirs."""
    try:
        files = [task / "children" for task in Path(f"/proc/{pid}/task").iterdir()]
        children = [int(text) for file in files for text in file.read_text().split()]
    except OSError:  # a process or thread that has ended meanwhile
        return
    for child in children:
        yield child
        yield from descendants(child)


def _cpu_seconds_of(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    # The name in brackets may hold anything; utime, stime, cutime, cstime are fields 14 to 17.
    return sum(map(int, text.rsplit(")", 1)[1].split()[11:15])) / _TICKS_PER_S
