"""The nearest known name for one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_OTHER_WORDS = {
    "attention": "attn_implementation",
    "logprobs": "return_logprobs",
    "max_completion_tokens": "max_new_tokens",
    "max_num_batched_tokens": "max_batch_tokens",
    "max_num_seqs": "max_requests_per_batch",
    "max_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "stop": "stop_strings",
    "torch_dtype": "dtype",
}
"""Names that other programs use for the same thing."""


def nearest_name(name: str, known: Collection[str]) -> str | None:
    """Return the known name that `name` was most likely meant to be, or None."""
    other = _OTHER_WORDS.get(name)
    if other in known:
        return other
    matches = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=0.6)
    return matches[0] if matches else None
