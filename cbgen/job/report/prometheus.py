"""The text that `--metrics` writes, in Prometheus' format, for the node exporter's textfiles.

The collector reads `*.prom` files as they are, without time stamps; two runs on one machine are
told apart by the label `output`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from cbgen.job.report.statistics import JobStatistics

Samples = Mapping[str, float]
"""Values by label, such as `result="failed"`; the empty text where there is no label."""

Family = tuple[str, str, Samples]
"""A metric: name, help text and samples."""


def metrics_text(statistics: JobStatistics, output: str, exit_code: int | None) -> str:
    """Return the content of a metrics file.

    Args:
        statistics: of the job.
        output: path of the rows, for the label.
        exit_code: None while the job runs.
    """
    label = f'output="{_escape(output)}"'
    lines = []
    for name, text, samples in (*_counters(statistics), *_gauges(statistics, exit_code)):
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        for own, value in samples.items():
            labels = f"{label},{own}" if own else label
            lines.append(f"{name}{{{labels}}} {value}")
    return "\n".join(lines) + "\n"


def _counters(statistics: JobStatistics) -> list[Family]:
    engine = statistics.engine
    families: list[Family] = [
        ("rows_read", "Rows taken from the input.", {"": statistics.rows_read}),
        (
            "rows_done",
            "Rows that have their output row.",
            {
                'result="answered"': statistics.rows_answered,
                'result="failed"': statistics.rows_failed,
                'result="resumed"': statistics.rows_resumed,
            },
        ),
        (
            "answers_finished",
            "Answers by finish reason, each sample of a row for itself; failed rows as error.",
            _by("reason", statistics.finish_reasons),
        ),
        ("row_errors", "Failed rows by error code.", _by("code", statistics.errors)),
        (
            "tokens",
            "Tokens of finished rows; cached and recomputed ones as the engine counts them.",
            {
                'kind="prompt"': statistics.prompt_tokens,
                'kind="completion"': statistics.completion_tokens,
                'kind="cached"': engine.num_cached_tokens,
                'kind="recomputed"': engine.num_recomputed_tokens,
            },
        ),
        ("generated_tokens", "Tokens drawn so far.", {"": engine.num_generated_tokens}),
        ("computed_tokens", "Tokens run through the model.", {"": engine.num_computed_tokens}),
        ("steps", "Steps of the engine.", {"": engine.num_steps}),
        ("preemptions", "Requests that lost their blocks to others.", {"": engine.num_preemptions}),
        ("evictions", "Cached blocks dropped to make room.", {"": engine.num_evictions}),
    ]
    return [(f"cbgen_{name}_total", text, samples) for name, text, samples in families]


def _gauges(statistics: JobStatistics, exit_code: int | None) -> list[Family]:
    engine = statistics.engine
    families: list[Family] = [
        (
            "requests",
            "Requests in the engine.",
            {
                'state="running"': engine.num_running,
                'state="waiting"': engine.num_waiting,
            },
        ),
        (
            "cache_blocks",
            "Blocks of the KV cache.",
            {
                'state="used"': engine.num_used_blocks,
                'state="free"': engine.num_blocks - engine.num_used_blocks,
            },
        ),
        ("cache_peak_used_blocks", "Most blocks used at once.", {"": engine.peak_used_blocks}),
        ("load_seconds", "Time until the model was ready.", {"": statistics.load_seconds}),
        ("run_seconds", "Time since the model was ready.", {"": statistics.run_seconds}),
        ("updated_timestamp_seconds", "When this was written.", {"": time.time()}),
        ("running", "Whether the run goes on.", {"": int(exit_code is None)}),
    ]
    if exit_code is not None:
        families.append(("exit_code", "How the run ended.", {"": exit_code}))
    return [(f"cbgen_{name}", text, samples) for name, text, samples in families]


def _by(label: str, counts: Mapping[str, int]) -> Samples:
    return {f'{label}="{_escape(name)}"': number for name, number in list(counts.items())}


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
