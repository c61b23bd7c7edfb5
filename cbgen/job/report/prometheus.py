"""The text that `--metrics` writes, in Prometheus' format, for the node exporter's textfiles.

The collector reads `*.prom` files as they are, without time stamps; two runs on one machine are
told apart by the label `output`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from cbgen.job.report.statistics import JobStatistics

Samples = float | tuple[str, Mapping[str, float]]
"""The value of a metric, or the name of its label and the value for each label."""


def metrics_text(statistics: JobStatistics, output: str, exit_code: int | None) -> str:
    """Return the content of a metrics file.

    Args:
        statistics: of the job.
        output: path of the rows, for the label.
        exit_code: None while the job runs.
    """
    label = f'output="{_escape(output)}"'
    lines = []
    for short_name, text, samples in _metrics(statistics, exit_code):
        name = f"cbgen_{short_name}"
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        if not isinstance(samples, tuple):
            lines.append(f"{name}{{{label}}} {samples}")
            continue
        own, values = samples
        for key, value in list(values.items()):  # at once: other threads count on
            lines.append(f'{name}{{{label},{own}="{_escape(key)}"}} {value}')
    return "\n".join(lines) + "\n"


def _metrics(
    statistics: JobStatistics, exit_code: int | None
) -> Iterator[tuple[str, str, Samples]]:
    """Yield name, help text and samples of each metric."""
    engine = statistics.engine
    done = {
        "answered": statistics.rows_answered,
        "failed": statistics.rows_failed,
        "resumed": statistics.rows_resumed,
    }
    reasons = "Answers by finish reason, each sample of a row for itself; failed rows as error."
    tokens = "Tokens of finished rows; cached and recomputed ones as the engine counts them."
    blocks = {"used": engine.num_used_blocks, "free": engine.num_blocks - engine.num_used_blocks}
    yield "rows_read_total", "Rows taken from the input.", statistics.rows_read
    yield "rows_done_total", "Rows that have their output row.", ("result", done)
    yield "answers_finished_total", reasons, ("reason", statistics.finish_reasons)
    yield "row_errors_total", "Failed rows by error code.", ("code", statistics.errors)
    yield "tokens_total", tokens, ("kind", statistics.tokens)
    yield "generated_tokens_total", "Tokens drawn so far.", engine.num_generated_tokens
    yield "computed_tokens_total", "Tokens run through the model.", engine.num_computed_tokens
    yield "steps_total", "Steps of the engine.", engine.num_steps
    yield "preemptions_total", "Requests that lost their blocks to others.", engine.num_preemptions
    yield "evictions_total", "Cached blocks dropped to make room.", engine.num_evictions
    requests = {"running": engine.num_running, "waiting": engine.num_waiting}
    yield "requests", "Requests in the engine.", ("state", requests)
    yield "cache_blocks", "Blocks of the KV cache.", ("state", blocks)
    yield "cache_peak_used_blocks", "Most blocks used at once.", engine.peak_used_blocks
    yield "load_seconds", "Time until the model was ready.", statistics.load_seconds
    yield "run_seconds", "Time since the model was ready.", statistics.run_seconds
    yield "updated_timestamp_seconds", "When this was written.", time.time()
    yield "running", "Whether the run goes on.", int(exit_code is None)
    if exit_code is not None:
        yield "exit_code", "How the run ended.", exit_code


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
