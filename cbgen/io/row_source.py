"""The rows of a run as records: read, told apart by dialect, and with every id used once.

This is the only place where reading, dialects and ids come together. Which records a resumed run
has answered already is the job's to know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from cbgen.io.dialects import InputFormat, with_dialect
from cbgen.io.ids import IdIndex
from cbgen.io.inputs import Shard
from cbgen.io.records import Record


class RowSource:
    """Gives each record of a run once, in reading order.

    Args:
        records: those of all shards.
        on_duplicate_id: whether a repeated id is an error of its row or gets a suffix.
        input_format: which records are lines of a batch file.
        shard: which records are given.

    Attributes:
        num_read: records read so far, those of other shards included.
        num_repeated_ids: those of them whose id an earlier record has.
    """

    def __init__(
        self,
        records: Iterable[Record],
        *,
        on_duplicate_id: Literal["error", "suffix"],
        input_format: InputFormat = "auto",
        shard: Shard | None = None,
    ) -> None:
        self.num_read = 0
        self.num_repeated_ids = 0
        self._records = records
        self._ids = IdIndex(on_duplicate_id)
        self._input_format = input_format
        self._shard = shard or Shard()

    def records(self) -> Iterator[Record]:
        """Yield the records of the shard. To be called once.

        Ids of other shards' records count, so all shards agree on which ids are repeated.

        Raises:
            UsageError: an input cannot be read; every record before that was given.
        """
        for record in self._records:
            self.num_read += 1
            identified = with_dialect(record, self._input_format)
            admitted = self._ids.admit(identified)
            self.num_repeated_ids += admitted is not identified
            if self._shard.takes(record.index):
                yield admitted
