"""`cbgen bench`: how fast the engine of a recipe is on a workload of token ids."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from cbgen.bench.workloads import WORKLOAD_NAMES, find_workload
from cbgen.cli import arguments
from cbgen.cli.console import Console, count, percent, rate
from cbgen.cli.logs import take_over_library_logs
from cbgen.io.json_values import encode_row, encode_value
from cbgen.io.output.atomic_file import AtomicFile
from cbgen.job.options import files_of_recipe
from cbgen.recipe.load import load_recipe

_WorkloadOption = Annotated[
    str,
    typer.Option(
        "--workload",
        metavar="NAME|FILE",
        help=f"{', '.join(WORKLOAD_NAMES)}, or a JSON file of prompts of token ids.",
    ),
]
_OutputsPath = Annotated[
    str | None,
    typer.Option(
        "--outputs",
        metavar="FILE",
        help="Write the generated token ids there, a list per request.",
    ),
]

_PARTS = ("schedule", "execute", "update", "rest")


def bench_command(
    context: typer.Context,
    recipe: arguments.RecipePath,
    workload: _WorkloadOption = "W1h",
    outputs: _OutputsPath = None,
    set_values: arguments.SetValues = None,
    quiet: arguments.Quiet = False,
) -> None:
    """Measure the engine on prompts of token ids: greedy, fixed lengths.

    A table for people on stderr, one JSON line on stdout. The sections prompt, generation_config
    and output of the recipe have no effect.

    Example: cbgen bench recipe.yaml --workload W3h
    """
    console: Console = context.obj
    console.quiet = quiet
    checked = load_recipe(recipe, set_values or ())
    make_workload = find_workload(workload)
    outputs_file = None
    if outputs is not None:
        files = files_of_recipe(checked, recipe)
        files.note_read(workload, "the workload")
        files.note_written(outputs, "the file of --outputs", given_as=f"--outputs {outputs}")
        outputs_file = AtomicFile(outputs, "--outputs")
    console.line("loading model", style="dim")
    from cbgen.bench.measurement import run_bench  # loads torch, which takes seconds

    take_over_library_logs()
    with checked.placing_errors():
        result = run_bench(
            checked,
            make_workload,
            on_running=lambda: console.line(f"running {workload}", style="dim"),
        )
    if outputs_file is not None:
        outputs_file.replace(encode_value(result.outputs).encode() + b"\n")
    for line in table_lines(result.summary):
        console.line(line)
    sys.stdout.write(encode_row(result.summary).decode())


def table_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return a result as the lines of a table: what, how much, and a note."""
    parts, machine = summary["parts"], summary["machine"]
    total, bound = summary["seconds"], summary["roofline_seconds"]
    rows = [
        ("workload", summary["workload"], count(summary["requests"], "requests")),
        ("load", _seconds(summary["load_seconds"]), ""),
        ("run", _seconds(total), count(parts["steps"], "steps")),
    ]
    for name in _PARTS:
        spent = parts[f"{name}_seconds"]
        rows.append((f"  {name}", _seconds(spent), percent(spent / total)))
        if name == "execute":
            rows += [
                (f"    {key.removesuffix('_seconds')}", _seconds(value), percent(value / total))
                for key, value in summary["forward"].items()
            ]
    if bound is None:
        rows.append(("roofline", "-", "not computed for mixtures of experts"))
    else:
        note = (
            f"{percent(bound / total)} of the run's time; {machine['gflop_per_s']:,.0f} GFLOP/s, "
            f"{machine['gb_per_s']:,.1f} GB/s with {count(machine['threads'], 'threads')}"
        )
        rows.append(("roofline", _seconds(bound), note))
    rows += [
        ("prompt tokens", count(summary["prompt_tokens"]), _saved(parts)),
        ("output tokens", count(summary["output_tokens"]), ""),
        ("output tokens/s", rate(summary["output_tokens_per_s"]), ""),
        ("all tokens/s", rate(summary["total_tokens_per_s"]), ""),
        ("peak memory", f"{summary['peak_memory_mb']:,.0f} MiB", ""),
        ("attention", machine["attn_implementation"], f"{machine['dtype']} on {machine['device']}"),
    ]
    if machine["other_cpu_seconds"] is not None:
        note = "CPU time of other processes during the run"
        rows.append(("others", _seconds(machine["other_cpu_seconds"]), note))
    return [f"{label:<18}{value:>14}  {note}".rstrip() for label, value, note in rows]


def _seconds(number: float) -> str:
    return f"{number:,.3f} s"


def _saved(parts: Mapping[str, Any]) -> str:
    note = f"{count(parts['cached_tokens'])} of them found in the cache"
    if parts["preemptions"]:
        recomputed = count(parts["recomputed_tokens"], "tokens")
        note += f"; {count(parts['preemptions'], 'preemptions')}, {recomputed} run again"
    return note
