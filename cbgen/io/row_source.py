"""The rows of a run as records: read, told apart by dialect, and with every id used once.

This is the only place where reading, dialects and ids come together. Which records a resumed run
has answered already is the job's to know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from cbgen.io.dialects import InputFormat, with_dialect
from cbgen.io.ids import IdIndex
from cbgen.io.inputs import Inputs, Shard
from cbgen.io.records import Record, record_of


class RowSource:
    """Gives each record of a run once, in reading order. Made by `of_inputs` or `of_mappings`.

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

    @classmethod
    def of_inputs(
        cls,
        inputs: Inputs,
        *,
        on_duplicate_id: Literal["error", "suffix"],
        input_format: InputFormat = "auto",
    ) -> RowSource:
        """Return the rows of input files.

        Args:
            inputs: the files, with limit and shard.
            on_duplicate_id: whether a repeated id is an error of its row or gets a suffix.
            input_format: which records are lines of a batch file.
        """
        return cls(
            inputs.all_records(),
            on_duplicate_id=on_duplicate_id,
            input_format=input_format,
            shard=inputs.shard,
        )

    @classmethod
    def of_mappings(
        cls, rows: Iterable[Mapping[str, Any]], *, on_duplicate_id: Literal["error", "suffix"]
    ) -> RowSource:
        """Return the rows that a caller in Python gives; messages call their source `rows`."""
        records = (record_of(row, index=index, source="rows") for index, row in enumerate(rows))
        return cls(records, on_duplicate_id=on_duplicate_id)

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
