"""An input that cannot be read to its end: what was read before is answered first."""

from __future__ import annotations

import pytest

from cbgen.errors import UsageError
from tests.helpers.jobs import make_stub_job, records_of, token_rows


def torn_records(count: int):
    yield from records_of(token_rows(count))
    raise UsageError("in.gz: the rest is missing")


@pytest.mark.parametrize("count", [0, 1, 700])
def test_rows_before_a_torn_end_are_answered_before_it_is_told(count):
    stub = make_stub_job(max_in_flight=16)
    rows = []
    with pytest.raises(UsageError, match="the rest is missing"):
        rows.extend(stub.job.rows(torn_records(count)))
    assert stub.statistics.rows_answered == count
    assert not stub.job.is_complete


def test_rows_that_still_run_are_waited_for():
    stub = make_stub_job()
    stub.engine.holds = lambda request: True
    rows = stub.job.rows(torn_records(3), on_idle=lambda: stub.engine.finish(stub.engine.held))
    assert [index for index, _ in (next(rows), next(rows), next(rows))] == [0, 1, 2]
    with pytest.raises(UsageError, match="the rest is missing"):
        next(rows)
