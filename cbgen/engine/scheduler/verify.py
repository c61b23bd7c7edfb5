"""The bookkeeping of a scheduler, recomputed from scratch; tests ask for it after every step."""

from __future__ import annotations

from collections.abc import Sequence

from cbgen.engine.cache.kv_cache import KVCache
from cbgen.engine.request import Request


def verify(
    cache: KVCache,
    *,
    active: Sequence[Request],
    waiting: Sequence[str],
    unfinished: Sequence[str],
    rows: Sequence[int],
    num_rows: int,
    expected_blocks: int,
) -> None:
    """Compare what a scheduler holds with what it should hold.

    Args:
        cache: is verified too.
        active: admitted requests, oldest admission first.
        waiting: ids of requests that wait.
        unfinished: ids of both.
        rows: free rows, and those of the admitted requests.
        num_rows: all rows.
        expected_blocks: of all admitted requests.

    Raises:
        AssertionError: something disagrees.
    """
    cache.check(active, waiting)
    if sorted(rows) != list(range(num_rows)):
        raise AssertionError(f"rows are lost or taken twice: {sorted(rows)}")
    if sorted([*waiting, *(request.request_id for request in active)]) != sorted(unfinished):
        raise AssertionError("a request is neither waiting nor admitted, or both")
    for request in active:
        if not 0 <= request.num_computed_tokens <= request.num_tokens <= request.max_tokens:
            raise AssertionError(f"{request.request_id} has computed more than it knows")
        if request.num_tokens != request.num_known_tokens + request.num_pending_tokens:
            raise AssertionError(f"{request.request_id} has lost count of its tokens")
    admissions = [request.admission for request in active]
    if admissions != sorted(admissions):
        raise AssertionError("admitted requests are not in order of admission")
    if expected_blocks != sum(request.expected_blocks for request in active):
        raise AssertionError("the expected blocks are not those of the admitted requests")
