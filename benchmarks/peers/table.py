"""Runs as a Markdown table: medians, and ratios to the first peer. Reads no clock and no file."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks.peers.measure import Run

DISTURBED_SHARE = 0.03
"""Share of all cores' time that others may take before a run counts as disturbed."""

_MARK = "\\*"

_HEAD = (
    "workload",
    "peer",
    "seconds: median (each)",
    "ratio",
    "output tokens/s",
    "load s",
    "peak MiB: anonymous / resident",
    "same sequences",
    "CPU s of others",
)


def table(runs: Sequence[Run], num_cores: int) -> str:
    """Return the table of all runs, by workload, in the order in which they first ran.

    A ratio is a peer's median time over that of the first peer of the same workload: below 1 it is
    faster.
    """
    lines = [_HEAD, ("---",) * len(_HEAD)]
    groups: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        groups.setdefault(run["workload"], {}).setdefault(run["peer"], []).append(run)
    is_any_disturbed = False
    for workload, peers in groups.items():
        base_s = _seconds(next(iter(peers.values())))
        for peer, all_runs in peers.items():
            done = [run for run in all_runs if "error" not in run]
            if not done:
                lines.append((workload, peer, "failed", *("",) * (len(_HEAD) - 3)))
                continue
            is_any_disturbed |= any(is_disturbed(run, num_cores) for run in done)
            lines.append((workload, peer, *_cells(done, base_s, num_cores)))
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    if is_any_disturbed:
        text += (
            f"\n\n{_MARK} disturbed: others took more than {DISTURBED_SHARE:.0%} of the cores' time"
        )
    return text


def is_disturbed(run: Run, num_cores: int) -> bool:
    """Tell whether others took so much CPU time that the run's seconds mean little."""
    available_s: float = run["seconds"] * num_cores
    return _others(run) > DISTURBED_SHARE * available_s


def _cells(runs: Sequence[Run], base_s: float | None, num_cores: int) -> tuple[str, ...]:
    seconds = median(run["seconds"] for run in runs)
    each = [f"{run['seconds']:.2f}" + _MARK * is_disturbed(run, num_cores) for run in runs]
    equal = [run["equal_sequences"] for run in runs if run.get("equal_sequences") is not None]
    return (
        each[0] if len(each) == 1 else f"{seconds:.2f} ({', '.join(each)})",
        "" if base_s is None else f"{seconds / base_s:.2f}",
        f"{median(run['output_tokens_per_s'] for run in runs):.0f}",
        f"{median(run['load_seconds'] for run in runs):.1f}",
        " / ".join(
            f"{max(run[name] for run in runs):,.0f}"
            for name in ("peak_anonymous_mb", "peak_resident_mb")
        ),
        f"{min(equal):.0%}" if equal else "",
        f"{max(map(_others, runs)):.1f}",
    )


def _seconds(runs: Sequence[Run]) -> float | None:
    return median([run["seconds"] for run in runs if "error" not in run] or [0]) or None


def _others(run: Run) -> float:
    return float(run["other_cpu_seconds"] + run["stolen_cpu_seconds"])
