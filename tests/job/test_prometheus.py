from __future__ import annotations

import re

from cbgen.engine.events import StepStats
from cbgen.job.report.prometheus import metrics_text
from cbgen.job.report.statistics import JobStatistics

SAMPLE = re.compile(r'(cbgen_[a-z_]+)\{(output="(?:[^"\\]|\\.)*"(?:,[a-z]+="[^"]*")?)\} (\S+)')


def families(text: str) -> dict[str, str]:
    """Return the type of every metric, checking that each is described once, before its samples."""
    kinds: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            current = line.split()[2]
            assert current not in kinds
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name == current
            kinds[name] = kind
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match[1] == current
            float(match[3])
    return kinds


def test_every_metric_is_described_and_counters_end_in_total():
    kinds = families(metrics_text(JobStatistics(), "out.jsonl", None))
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in kinds.items())
    assert set(kinds.values()) == {"counter", "gauge"}


def test_the_samples_are_the_job_s():
    statistics = JobStatistics(rows_read=3)
    statistics.count_answer(["stop"], prompt_tokens=10, completion_tokens=6)
    statistics.count_failure("no_prompt")
    statistics.engine = StepStats(num_running=5, num_blocks=8, num_used_blocks=3)
    text = metrics_text(statistics, "out.jsonl", None)
    assert 'cbgen_rows_read_total{output="out.jsonl"} 3\n' in text
    assert 'cbgen_rows_done_total{output="out.jsonl",result="failed"} 1\n' in text
    assert 'cbgen_row_errors_total{output="out.jsonl",code="no_prompt"} 1\n' in text
    assert 'cbgen_requests{output="out.jsonl",state="running"} 5\n' in text
    assert 'cbgen_cache_blocks{output="out.jsonl",state="free"} 5\n' in text
    assert "cbgen_exit_code" not in text


def test_the_exit_code_is_there_at_the_end():
    text = metrics_text(JobStatistics(), "out.jsonl", 4)
    assert 'cbgen_exit_code{output="out.jsonl"} 4\n' in text
    assert 'cbgen_running{output="out.jsonl"} 0\n' in text


def test_labels_are_escaped():
    text = metrics_text(JobStatistics(), 'a"b\\c\nd', None)
    assert 'output="a\\"b\\\\c\\nd"' in text
    families(text)
