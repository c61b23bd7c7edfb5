"""Whole comparisons: which peers there are, in which order they run, what they are compared with.

Measures nothing itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.peers.config import Comparison, Peer
from benchmarks.peers.measure import Circumstances, Outputs, Run, equal_share, run_peer
from cbgen.bench.workloads import Workload
from cbgen.errors import UsageError

Tell = Callable[[str], None]


def installed(comparison: Comparison, names: Sequence[str], tell: Tell) -> Comparison:
    """Return the comparison with the named peers that are there; tell which are not.

    Args:
        comparison: as it was read.
        names: peers that are wanted, in their order; none = all, in the order of the file.
        tell: gets a line for each peer that is skipped.

    Raises:
        UsageError: there is no peer of that name, or none of them is installed.
    """
    known = {peer.name: peer for peer in comparison.peers}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"no peer is called {unknown[0]!r}; there are {', '.join(known)}")
    wanted = [known[name] for name in names] or comparison.peers
    peers = tuple(peer for peer in wanted if _is_there(peer, tell))
    if not peers:
        raise UsageError("none of the peers is installed")
    reference = comparison.reference
    if reference is not None and not _is_there(reference, tell):
        reference = None
    return replace(comparison, peers=peers, reference=reference)


@dataclass(frozen=True, slots=True)
class Sitting:
    """How a comparison is run.

    Attributes:
        rounds: times that each peer runs each workload.
        where: what is the same for all runs.
        references: folder in which the sequences of the reference are kept.
        turn: entered for each run, load included; may wait until others are done.
        tell: gets lines for people.
    """

    rounds: int
    where: Circumstances
    references: Path
    turn: Callable[[], AbstractContextManager[None]]
    tell: Tell


def compare(
    comparison: Comparison, workloads: Sequence[Workload], sitting: Sitting
) -> Iterator[Run]:
    """Yield the runs as they end: workload by workload, in each A B A B ..."""
    for workload in workloads:
        reference = _reference_outputs(comparison.reference, workload, sitting)
        for number in range(sitting.rounds):
            for peer in comparison.peers:
                if not peer.runs(workload.name):
                    continue
                with sitting.turn():
                    run, outputs = run_peer(peer, workload, sitting.where)
                if reference is not None and "error" not in run:
                    run["equal_sequences"] = equal_share(outputs, reference)
                yield run | {"round": number + 1}


def _is_there(peer: Peer, tell: Tell) -> bool:
    if peer.missing is not None:
        tell(f"{peer.name}: skipped, there is no {peer.missing}")
    return peer.missing is None


def _reference_outputs(
    reference: Peer | None, workload: Workload, sitting: Sitting
) -> Outputs | None:
    """Return the sequences to compare with: kept ones, else generated now; None without any."""
    if reference is None:
        return None
    file = sitting.references / f"{workload.name}-{_fingerprint(reference, workload)}.json"
    if file.exists():
        kept: Outputs = json.loads(file.read_text())
        return kept
    sitting.tell(f"{workload.name}: generating the reference, once")
    with sitting.turn():
        run, outputs = run_peer(reference, workload, sitting.where)
    if "error" in run:
        sitting.tell(f"{workload.name}: no sequences are compared: {run['error']}")
        return None
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(outputs))
    return outputs


def _fingerprint(reference: Peer, workload: Workload) -> str:
    """Return what changes with the workload, the reference's code and its model."""
    files = [file for file in sorted(reference.model.rglob("*")) if file.is_file()]
    parts = (
        [(request.prompt, request.max_new_tokens) for request in workload.requests],
        hashlib.sha256(reference.adapter.read_bytes()).hexdigest(),
        sorted(reference.options.items()),
        [
            (file.name, file.stat().st_size, file.stat().st_mtime_ns)
            for file in files or [reference.model]
        ],
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
