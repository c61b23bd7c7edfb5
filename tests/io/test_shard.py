from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbgen.errors import UsageError
from cbgen.io.inputs import Shard


def test_a_shard_is_written_as_number_and_count():
    shard = Shard.parse("3/8")
    assert (shard.number, shard.count, str(shard)) == (3, 8, "3/8")


@pytest.mark.parametrize("text", ["", "3", "/8", "3/", "-1/8", "1/8/2", "a/b", "1 / 2", "²/8"])
def test_what_is_not_two_numbers_is_refused(text):
    with pytest.raises(UsageError, match=r"expected i/n, such as 0/8"):
        Shard.parse(text)


def test_a_number_that_is_not_there_is_refused_with_the_range():
    with pytest.raises(UsageError, match=r"0/8 to 7/8 \(in Slurm: --array=0-7\)"):
        Shard.parse("8/8")


def test_no_shards_are_refused():
    with pytest.raises(UsageError, match="at least one"):
        Shard.parse("0/0")


@given(count=st.integers(1, 12), num_records=st.integers(0, 100))
def test_every_record_belongs_to_one_shard_at_positions_without_gaps(count, num_records):
    taken: list[int] = []
    for number in range(count):
        shard = Shard(number, count)
        indexes = [index for index in range(num_records) if shard.takes(index)]
        assert [shard.position(index) for index in indexes] == list(range(len(indexes)))
        assert shard.size(num_records) == len(indexes)
        taken += indexes
    assert sorted(taken) == list(range(num_records))
