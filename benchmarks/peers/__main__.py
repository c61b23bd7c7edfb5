"""Runs cbgen and its peers in turns on the same workloads: `python -m benchmarks.peers --help`."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.peers.compare import Sitting, compare, installed
from benchmarks.peers.config import read_comparison
from benchmarks.peers.measure import Circumstances, Run
from benchmarks.peers.table import table
from cbgen.bench.workloads import WORKLOAD_NAMES, find_workload
from cbgen.errors import UsageError

_CACHE = Path("~/.cache/cbgen/peers")
_TIMEOUT_S = 900.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for.

    Returns:
        The exit code: 0, 1 if a run failed, 2 if what was asked for is wrong.
    """
    asked = _parser().parse_args(arguments)
    try:
        runs = [
            json.loads(line) for file in asked.earlier for line in file.read_text().splitlines()
        ]
        comparison = read_comparison(asked.comparison)
        workloads = [find_workload(name)(comparison.vocab_size) for name in asked.workloads]
        comparison = installed(comparison, asked.peers, _tell)
        cache = asked.cache.expanduser()
        (logs := cache / "logs").mkdir(parents=True, exist_ok=True)
    except (UsageError, OSError, ValueError) as error:
        _tell(f"error: {error}")
        return 2
    sitting = Sitting(
        rounds=asked.rounds,
        where=Circumstances(asked.threads, asked.timeout, logs),
        references=cache / "references",
        turn=partial(_turn, asked.lock),
        tell=_tell,
    )
    has_failed = False
    for run in compare(comparison, workloads, sitting):
        print(json.dumps(run), flush=True)
        _tell(_in_short(run))
        has_failed |= "error" in run
        runs.append(run)
    _tell("\n" + table(runs, os.cpu_count() or 1))
    return int(has_failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="Run cbgen and its peers in turns on the same workloads. One JSON line for "
        "each run goes to stdout, a Markdown table to stderr.",
    )
    add = parser.add_argument
    add("comparison", type=Path, help="YAML file that names the peers")
    add(
        "--workloads",
        nargs="+",
        default=["W1h", "W2h", "W3h", "W4h"],
        metavar="NAME",
        help=f"{', '.join(WORKLOAD_NAMES)} or a file of `cbgen bench` (default: the four with h)",
    )
    add("--peers", nargs="+", default=[], metavar="NAME", help="only these, in this order")
    add("--rounds", type=int, default=3, help="runs of each peer on each workload (default: 3)")
    add("--threads", type=int, default=os.cpu_count(), help="of each peer (default: all cores)")
    add("--timeout", type=float, default=_TIMEOUT_S, help="seconds for one run (default: 900)")
    add("--lock", type=Path, help="file whose lock is held during each run (see flock)")
    add("--cache", type=Path, default=_CACHE, help=f"references and logs (default: {_CACHE})")
    add(
        "--earlier",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="JSON lines of earlier runs that the table is to hold as well",
    )
    return parser


@contextlib.contextmanager
def _turn(lock: Path | None) -> Iterator[None]:
    """Hold the lock, if there is one."""
    if lock is None:
        yield
        return
    with open(lock, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _in_short(run: Run) -> str:
    begin = f"{run['workload']} {run['peer']}, round {run['round']}: "
    if "error" in run:
        return begin + f"FAILED: {run['error']}"
    return begin + f"{run['seconds']:.2f} s, {run['output_tokens_per_s']:.0f} tokens/s"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    # Else a peer, which has a session of its own, would run on without the script.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    sys.exit(main())
