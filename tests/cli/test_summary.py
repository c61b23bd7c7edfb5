"""The lines before and after a run."""

from __future__ import annotations

from collections import Counter

from cbgen.cli.summary import settings_lines, summary_lines, written_rows
from cbgen.engine.events import StepStats
from cbgen.job.report.statistics import JobStatistics
from cbgen.job.settings import Setting


def make_statistics(**changes) -> JobStatistics:
    fields = {
        "rows_read": 100,
        "rows_answered": 100,
        "rows_written": 100,
        "prompt_tokens": 12_000,
        "completion_tokens": 3_000,
        "finish_reasons": Counter(stop=95, length=5),
        "load_seconds": 2.5,
        "run_started": 10.0,
        "run_ended": 40.0,
    }
    return JobStatistics(**{**fields, **changes})


def summary(**changes) -> str:
    return "\n".join(summary_lines(make_statistics(**changes), "out.jsonl"))


def test_the_summary_of_a_good_run():
    assert summary().splitlines() == [
        "rows       100 read, 100 answered, 0 failed",
        "tokens     12,000 prompt, 3,000 completion",
        "time       2.5 s load, 30.0 s run: 3.3 rows/s, 400 prompt and 100 completion tokens/s",
        "ended by   stop 95 (95%), length 5 (5%)",
        "output     out.jsonl",
    ]


def test_many_answers_cut_by_length_get_a_hint():
    assert "max_new_tokens" in summary(finish_reasons=Counter(stop=50, length=50))
    assert "max_new_tokens" not in summary()


def test_errors_are_counted_by_code_the_most_frequent_first():
    text = summary(rows_failed=4, errors=Counter(invalid_json=1, prompt_too_long=3))
    assert "errors     prompt_too_long 3, invalid_json 1" in text


def test_preemptions_are_told_with_what_they_cost():
    text = summary(engine=StepStats(num_preemptions=2, num_recomputed_tokens=1500))
    assert "preempted  2 times, 1,500 tokens computed again" in text


def test_a_run_without_rows_divides_by_nothing():
    assert "0 read" in summary(
        rows_read=0, rows_answered=0, finish_reasons=Counter(), run_ended=10.0
    )


def test_settings_read_like_a_recipe_with_their_origins():
    settings = [
        Setting("model.path", "~/models/a b", "r.yaml:2"),
        Setting("model.device", "cpu", "default: auto"),
        Setting("generation_config.eos_token_id", list(range(100)), "model"),
        Setting("max_context", 8192, "the model's config"),
    ]
    lines = settings_lines(settings)
    assert [line.split("#")[0].rstrip() for line in lines] == [
        "model:",
        '  path: "~/models/a b"',
        "  device: cpu",
        "generation_config:",
        "  eos_token_id: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16...",
        "max_context: 8192",
    ]
    assert lines[2].endswith("# default: auto")


def test_written_rows_name_the_files_that_hold_them(tmp_path):
    target = tmp_path / "out.jsonl"
    target.touch()
    remedy = "; --resume goes on from there"
    assert written_rows(make_statistics(), str(target)) == f"100 rows are in {target}{remedy}"
    journal = tmp_path / "out.jsonl.journal"
    journal.touch()
    assert written_rows(make_statistics(), str(target)).endswith(f"{target} and {journal}{remedy}")
    assert written_rows(make_statistics(rows_written=0), str(target)) == "no row was written"
