"""`cbgen plan`: what a run would be, before it costs anything, as a table and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import typer
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from cbgen.cli import arguments
from cbgen.cli.console import Console, count, memory_size, one_line, percent
from cbgen.cli.exits import ExitCode
from cbgen.cli.logs import take_over_library_logs
from cbgen.cli.summary import settings_lines
from cbgen.io.inputs import Inputs
from cbgen.io.json_values import encode_value
from cbgen.recipe.load import load_recipe

_BAR_WIDTH = 30
_SHARING = "continuous_batching_config.allow_block_sharing"
_OFFLOAD = "continuous_batching_config.cpu_offload_space"
_ESTIMATE = {
    "prompt_tokens": "prompt tokens",
    "completion_tokens": "completion tokens",
    "steps": "steps, about",
}
_LABELS = {
    "of_average_length": "requests of average length",
    "of_longest": "requests as long as the longest",
    "of_full_context": "requests of full context",
}


def plan_command(
    context: typer.Context,
    recipe: arguments.RecipePath,
    input_paths: arguments.PlannedPaths = None,
    set_values: arguments.SetValues = None,
    limit: arguments.Limit = None,
    shard: arguments.ShardOption = None,
    input_format: arguments.FormatOption = "auto",
    quiet: arguments.Quiet = False,
) -> None:
    """Check rows and show what a run would do; no weights are loaded.

    A table for people on stderr, one JSON line on stdout. Exit code 1 if there are bad rows.

    Example: cbgen plan recipe.yaml -i prompts.jsonl
    """
    console: Console = context.obj
    console.quiet = quiet
    checked = load_recipe(recipe, set_values or ())
    inputs = Inputs(input_paths, limit=limit, shard=shard) if input_paths else None
    from cbgen.job.dry_run import plan_job  # loads torch, which takes seconds

    take_over_library_logs()
    waits = console.can_redraw and not quiet
    status = console.rich.status("reading config and rows") if waits else nullcontext()
    with checked.placing_errors(), status:
        plan = plan_job(checked, inputs, input_format)
    for line in settings_lines(plan.settings):
        console.line(line, style="dim")
    show_plan(console, plan.summary)
    sys.stdout.write(encode_value({"recipe": recipe, **plan.summary}) + "\n")
    raise typer.Exit(ExitCode.ROWS_FAILED if plan.num_bad_rows else ExitCode.OK)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line: what, how much, and a note."""

    label: str
    value: str
    note: str = ""
    style: str = ""
    """Style of the note."""


def show_plan(console: Console, summary: Mapping[str, Any]) -> None:
    """Write a plan to the console."""
    if console.quiet:
        return
    sections = plan_sections(summary)
    if not console.can_redraw:
        for title, entries in sections:
            console.line(title)
            for entry in entries:
                console.line(f"  {entry.label:<32} {entry.value:>14}  {entry.note}".rstrip())
        return
    table = Table(box=SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for title, entries in sections:
        table.add_section()
        table.add_row(Text(title, style="bold cyan"))
        for entry in entries:
            table.add_row(f"  {entry.label}", entry.value, Text(entry.note, style=entry.style))
    console.rich.print(table)


def plan_sections(summary: Mapping[str, Any]) -> list[tuple[str, list[Entry]]]:
    """Return the parts of a plan: title and lines."""
    parts = {
        "rows": _rows(summary),
        "prompt tokens": _prompt_tokens(summary["prompt_tokens"]),
        "cache": _cache(summary),
        "memory": _memory(summary["memory"]),
        "at once": _at_once(summary),
        "if every answer reaches its limit": [
            Entry(_ESTIMATE[name], count(number))
            for name, number in (summary["estimate"] or {}).items()
        ],
    }
    return [(title, entries) for title, entries in parts.items() if entries]


def _rows(summary: Mapping[str, Any]) -> list[Entry]:
    if summary["rows"] is None:
        return []
    bad = summary["bad_rows"]
    entries = [
        Entry("rows", count(summary["rows"])),
        Entry("bad rows", count(bad["count"])),
        *(Entry(f"  {code}", count(number)) for code, number in bad["codes"].items()),
        Entry("repeated ids", count(summary["duplicate_ids"])),
    ]
    if summary["may_outgrow_cache"]:
        note = "answers that reach their limit need more than the whole cache"
        entries.append(Entry("may fail", count(summary["may_outgrow_cache"]), note, "red"))
    entries += [
        Entry(f"  {one_line(item['place'])}", "", one_line(item["message"]), "red")
        for item in bad["first"]
    ]
    return entries


def _prompt_tokens(lengths: Mapping[str, Any] | None) -> list[Entry]:
    if lengths is None:
        return []
    names = ("total", "min", "median", "p90", "max")
    entries = [Entry(name, count(lengths[name])) for name in names]
    most = max(bucket["rows"] for bucket in lengths["histogram"])
    for bucket in lengths["histogram"]:
        bar = "#" * -(-_BAR_WIDTH * bucket["rows"] // most)
        label = f"  {bucket['from']:,} to {bucket['to']:,}"
        entries.append(Entry(label, count(bucket["rows"], "rows"), bar, "cyan"))
    return entries


def _cache(summary: Mapping[str, Any]) -> list[Entry]:
    cache, host_blocks = summary["cache"], summary["host_pool"]["blocks"]
    sharing, offload = (summary["decisions"][name] for name in (_SHARING, _OFFLOAD))
    tokens = f"{count(cache['tokens'], 'tokens')} in blocks of {cache['page_size']}"
    pool = []
    if cache["pool_blocks"] != cache["blocks"]:
        note = f"of {_page_size(cache['block_bytes'])}, shared by all layer groups"
        pool = [Entry("blocks of the pool", count(cache["pool_blocks"]), note)]
    sharing_words = "on" if sharing["value"] else "off"
    host_words = count(host_blocks, "blocks") if host_blocks else "off"
    return [
        *(_group(kind) for kind in summary["groups"]),
        Entry("cache blocks", count(cache["blocks"]), tokens),
        *pool,
        Entry("longest request", count(cache["longest_request"], "tokens")),
        Entry("prefix sharing", sharing_words, one_line(sharing["reason"])),
        Entry("host pool", host_words, one_line(offload["reason"])),
        *(Entry("warning", "", one_line(text), "red") for text in summary["warnings"]),
    ]


def _group(kind: Mapping[str, Any]) -> Entry:
    label = f"{kind['attention']} attention"
    if kind["window"] is not None:
        label = f"{kind['attention']}, {kind['window']:,} tokens"
    note = f"{count(kind['groups'], 'groups')}, pages of {_page_size(kind['page_bytes'])}"
    if kind["most_blocks_per_request"] is not None:
        note += f", at most {kind['most_blocks_per_request']} a request"
    return Entry(label, count(kind["layers"], "layers"), note)


def _page_size(num_bytes: int) -> str:
    return f"{num_bytes / 1024:,.0f} KiB" if num_bytes < 2**20 else memory_size(num_bytes)


def _memory(memory: Mapping[str, int]) -> list[Entry]:
    return [
        Entry(name.replace("_", " "), memory_size(size), percent(size / memory["free_now"]))
        for name, size in memory.items()
        if size or name not in ("block_tables", "host_pool")
    ]


def _at_once(summary: Mapping[str, Any]) -> list[Entry]:
    at_once, workload = summary["requests_at_once"], summary["workload"]
    entries = [
        Entry("requests, at most", count(at_once["at_most"])),
        *(Entry(text, count(at_once[name])) for name, text in _LABELS.items() if name in at_once),
    ]
    if workload is not None:
        note = "for as many requests as long as the longest"
        entries.append(Entry("useful blocks", count(workload["useful_blocks"]), note))
    return entries
