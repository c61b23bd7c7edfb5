from __future__ import annotations

import pytest

from cbgen.cli.stopping import parse_duration
from cbgen.errors import UsageError

MINUTE, HOUR, DAY = 60, 3600, 86400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("15m", 15 * MINUTE),
        ("3h50m", 3 * HOUR + 50 * MINUTE),
        ("2d", 2 * DAY),
        ("1d2h3m4s", DAY + 2 * HOUR + 3 * MINUTE + 4),
        ("02:03", 2 * MINUTE + 3),
        ("1:02:03", HOUR + 2 * MINUTE + 3),
        ("1-02:03:04", DAY + 2 * HOUR + 3 * MINUTE + 4),
        ("1-02:03", DAY + 2 * HOUR + 3 * MINUTE),
        ("1-2", DAY + 2 * HOUR),
    ],
)
def test_forms_of_people_and_batch_systems_are_read(text, seconds):
    assert parse_duration(text, "--time-limit") == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-5", "5 m", "1h1x", "m", "1:2:3:4", "1.5h"])
def test_anything_else_is_refused_with_examples(text):
    with pytest.raises(UsageError, match=r"--time-limit is .*3h50m"):
        parse_duration(text, "--time-limit")
