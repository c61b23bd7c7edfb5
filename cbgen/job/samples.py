"""The requests of a row, one for each of its samples: how they are named, in which order they run.

Rows of one sample are the common case and have one request under their own id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from cbgen.engine.request import Request

_ENDS_LIKE_A_SAMPLE = re.compile(r"#[0-9]+\Z")


def request_ids(row_id: str, num_samples: int) -> list[str]:
    """Return an id for each request of a row; requests of different rows never share one.

    A single sample has the id of its row, sample i of several has `ID#i`. A row whose own id ends
    like that gets a number in any case: of every id with a number at its end, what stands before
    the last number is then the id of a row, and of every other one all of it is.
    """
    if num_samples == 1 and _ENDS_LIKE_A_SAMPLE.search(row_id) is None:
        return [row_id]
    return [f"{row_id}#{index}" for index in range(num_samples)]


def in_prefix_order(rows: Iterable[Sequence[Request]]) -> list[Request]:
    """Return the requests of rows, those with a common beginning of their prompts side by side.

    The cache shares the blocks of a common prefix while a request holds them or they are not yet
    evicted. Prompts that share one (a system prompt, the examples of a task) may stand far apart in
    a mixed input; sorted by their token ids they run one after the other, so that a prefix is
    computed once and its blocks are let go before those of the next one are needed. The sort is
    stable and moves whole rows: samples of one row stay together.

    Args:
        rows: the requests of each row, at least one.
    """
    ordered = sorted(rows, key=lambda requests: requests[0].prompt_ids)
    return [request for requests in ordered for request in requests]
