"""The arguments and options of the commands, one name each, so that signatures stay readable."""

from __future__ import annotations

from signal import Signals
from typing import Annotated, Literal

from typer import Argument, Option

from cbgen.cli.stopping import parse_duration, parse_signal
from cbgen.io.dialects import InputFormat
from cbgen.io.inputs import Shard

RecipePath = Annotated[str, Argument(metavar="RECIPE", help="Recipe, a YAML file.")]
InputPaths = Annotated[
    list[str] | None,
    Option(
        "--input",
        "-i",
        show_default=False,
        metavar="FILE",
        help="Rows: .jsonl, .gz, .zst or .parquet, with wildcards if quoted; repeatable; "
        "- is stdin (default).",
    ),
]
PlannedPaths = Annotated[
    list[str] | None,
    Option(
        "--input",
        "-i",
        show_default=False,
        metavar="FILE",
        help="Rows to check, as for run; without it only the engine is planned.",
    ),
]
OutputPath = Annotated[
    str,
    Option(
        "--output",
        "-o",
        show_default=False,
        metavar="FILE",
        help="Answers: JSONL, .gz, .zst, .parquet; - is stdout.",
    ),
]
SetValues = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="Set section.key of the recipe; repeatable."),
]
Limit = Annotated[
    int | None,
    Option("--limit", min=1, metavar="N", help="Take the first N rows."),
]
ShardOption = Annotated[
    Shard | None,
    Option(
        "--shard",
        parser=Shard.parse,
        metavar="I/N",
        help="Take every Nth row from row I on (I from 0); cbgen merge joins the outputs.",
    ),
]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace an existing output.")]
Resume = Annotated[bool, Option("--resume", help="Go on with an existing output, or begin one.")]
ResumeAny = Annotated[
    bool, Option("--resume-any", help="As --resume, even if recipe or input have changed.")
]
Retry = Annotated[
    str | None,
    Option(
        "--retry",
        metavar="KINDS",
        help="As --resume, and redo rows that ended with error, length, stop or cancelled.",
    ),
]
Strict = Annotated[bool, Option("--strict", help="Stop at the first bad row.")]
OrderOption = Annotated[
    Literal["input", "completion"] | None,
    Option("--order", help="Answers in input order, or as they finish."),
]
FormatOption = Annotated[
    InputFormat,
    Option(
        "--format",
        help="Form of the rows: auto tells it row by row; openai and vllm are lines of an OpenAI "
        "Batch or a vLLM run-batch file, answered in that form.",
    ),
]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Show only errors.")]
TimeLimit = Annotated[
    float | None,
    Option(
        "--time-limit",
        parser=parse_duration,
        metavar="TIME",
        help="End within this time, with exit code 4: 90s, 15m, 3h50m, 1-02:03:04.",
    ),
]
RequeueSignal = Annotated[
    Signals | None,
    Option(
        "--requeue-signal",
        parser=parse_signal,
        metavar="NAME",
        help="End on this signal, with exit code 4: USR1.",
    ),
]
StatsPath = Annotated[
    str | None,
    Option("--stats", metavar="FILE.json", help="Write counts, rates and settings there."),
]
MetricsPath = Annotated[
    str | None,
    Option("--metrics", metavar="FILE.prom", help="Write Prometheus metrics there."),
]
TracePath = Annotated[
    str | None,
    Option("--trace", metavar="FILE.json", help="Write a timeline there (Perfetto)."),
]
