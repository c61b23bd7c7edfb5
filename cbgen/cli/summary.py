"""What a run says before and after: its settings, its summary, where its rows are.

Returns lines and writes none.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from cbgen.cli.console import count, percent, rate, seconds
from cbgen.io.inputs import Inputs
from cbgen.io.output.output_file import journal_path
from cbgen.job.report.statistics import JobStatistics
from cbgen.job.settings import Setting
from cbgen.values import show_yaml

_ORIGIN_COLUMN = 40
_LONGEST_VALUE = 60
_MANY_CUT = 0.1
"""Share of answers cut by their length limit above which the summary gives a hint."""


def describe_inputs(inputs: Inputs) -> str:
    """Return the inputs of a run in a few words."""
    names = inputs.names
    text = names[0] if len(names) == 1 else f"{names[0]} and {count(len(names) - 1, 'more files')}"
    return text if inputs.shard.count == 1 else f"{text} (shard {inputs.shard})"


def settings_lines(settings: Sequence[Setting]) -> list[str]:
    """Return the effective settings as a recipe would have them, each with its origin."""
    lines = []
    section = ""
    for setting in settings:
        prefix, _, key = setting.name.rpartition(".")
        if prefix != section:
            section = prefix
            if section:
                lines.append(f"{section}:")
        indent = "  " if section else ""
        value = show_yaml(setting.value)
        if len(value) > _LONGEST_VALUE:
            value = value[: _LONGEST_VALUE - 3] + "..."
        lines.append(f"{f'{indent}{key}: {value}':{_ORIGIN_COLUMN}}  # {setting.origin}")
    return lines


def summary_lines(statistics: JobStatistics, output: str) -> list[str]:
    """Return the summary of a finished run.

    Args:
        statistics: of the run.
        output: path of the output, or `-`.
    """
    total, engine = statistics.total(), statistics.engine
    rows = f"{count(statistics.rows_read)} read, {count(total.rows_answered)} answered"
    rows += f", {count(total.rows_failed)} failed"
    if statistics.rows_resumed:
        rows += f"; {count(statistics.rows_resumed)} of these by an earlier run"
    tokens = f"{count(total.prompt_tokens)} prompt, {count(total.completion_tokens)} completion"
    reasons = ", ".join(
        f"{reason} {count(number)} ({percent(number / total.num_answers)})"
        for reason, number in total.finish_reasons.most_common()
        if reason != "error"
    )
    hint = ""
    if total.finish_reasons["length"] > _MANY_CUT * total.num_answers:
        hint = "many answers are cut off by length: raise generation_config.max_new_tokens"
    errors = sorted(total.errors.items(), key=lambda item: (-item[1], item[0]))
    preempted = ""
    if engine.num_preemptions:
        recomputed = count(engine.num_recomputed_tokens, "tokens")
        preempted = f"{count(engine.num_preemptions, 'times')}, {recomputed} computed again"
    items = [
        ("rows", rows),
        ("tokens", tokens),
        ("time", _time(statistics)),
        ("ended by", reasons),
        ("", hint),
        ("errors", ", ".join(f"{code} {count(number)}" for code, number in errors)),
        ("", _how_to_see_failed_rows(statistics, output) if total.rows_failed else ""),
        ("preempted", preempted),
        ("output", "stdout" if output == "-" else output),
    ]
    return [f"{label:<10} {text}" for label, text in items if text]


def _time(statistics: JobStatistics) -> str:
    load, run = statistics.load_seconds, statistics.run_seconds
    text = f"{seconds(load)} load, {seconds(run)} run"
    if run <= 0:
        return text
    return (
        f"{text}: {rate(statistics.rows_done / run)} rows/s, "
        f"{rate(statistics.prompt_tokens / run)} prompt and "
        f"{rate(statistics.completion_tokens / run)} completion tokens/s"
    )


def _how_to_see_failed_rows(statistics: JobStatistics, output: str) -> str:
    # `error` is the last field of every row, and rows are written without spaces. A refusal in
    # OpenAI's form has null there and the error in the body of its response.
    pattern = """-v '"error":null}$'"""
    if statistics.has_batch_lines:
        pattern = """-E '"response":{"status_code":[45]|[^l]}$'"""
    suffix = output.rpartition(".")[2]
    if output == "-" or suffix == "parquet":
        return "a failed row has an object in its field error"
    if suffix == "zst":
        return f"to see them: zstdcat {shlex.quote(output)} | grep {pattern}"
    tool = "zgrep" if suffix == "gz" else "grep"
    return f"to see them: {tool} {pattern} {shlex.quote(output)}"


def written_rows(statistics: JobStatistics, output: str) -> str:
    """Return where the rows are, for a run that ended early."""
    done = statistics.rows_written + statistics.rows_resumed
    if done == 0:
        return "no row was written"
    rows = f"{count(done, 'rows')} {'is' if done == 1 else 'are'}"
    if output == "-":
        return f"{rows} on stdout"
    places = [path for path in (output, journal_path(output)) if os.path.exists(path)]
    return f"{rows} in {' and '.join(places)}; --resume goes on from there"
