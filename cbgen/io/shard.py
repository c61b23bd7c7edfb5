"""Which records of an input one process of several takes, and where their rows stand in its output.

Record `index` belongs to shard `index % count`. Indexes stay those of the whole input, so that the
outputs can be joined; the output of a shard holds its rows at positions 0, 1, 2, ...
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cbgen.errors import UsageError


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `number` (from 0) of `count`; by default all records."""

    number: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read `i/n`.

        Raises:
            UsageError: it is not two numbers, or there is no such shard.
        """
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
        if match is None:
            raise UsageError(f"--shard {text}: expected i/n, such as 0/8 for the first of eight")
        number, count = map(int, match.groups())
        if count == 0:
            raise UsageError(f"--shard {text}: there must be at least one shard")
        if number >= count:
            raise UsageError(
                f"--shard {text}: shards are counted from 0, so {count} of them are 0/{count} to "
                f"{count - 1}/{count} (in Slurm: --array=0-{count - 1})"
            )
        return cls(number, count)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def takes(self, index: int) -> bool:
        """Whether a record belongs to this shard."""
        return index % self.count == self.number

    def position(self, index: int) -> int:
        """Return how many records of this shard come before one of its own."""
        return index // self.count

    def size(self, num_records: int) -> int:
        """Return how many of the first `num_records` records belong to this shard."""
        return (num_records - self.number + self.count - 1) // self.count
