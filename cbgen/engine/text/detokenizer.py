"""Text of a growing answer, piece by piece, never half a character.

Tokens are not characters: a token may hold one byte of a character of four, and what a token reads
as can depend on the one before it (word beginnings, merged spaces). So each piece is the difference
of two decodings of a window that begins a few tokens earlier, and text is held back while it ends
in an incomplete character. The windows are those of Hugging Face's text-generation-inference
(`prefix_offset`, `read_offset`) and vLLM's incremental detokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_INCOMPLETE = "\ufffd"
_MAX_HELD_TOKENS = 16
"""A character has at most 4 bytes and so at most 4 tokens. What stays unreadable for longer is not
going to be a character; holding on to it would make the window grow with the answer."""


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""


class IncrementalDetokenizer:
    """Owns the place up to which an answer has been given out as text.

    The pieces joined are `tokenizer.decode(all ids)`, for tokenizers that decode a text from left
    to right (all byte-level ones; sentencepiece ones but for an answer that ends inside of a
    character).

    Args:
        tokenizer: decodes; is not changed.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Decoder, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []
        self._window = 0  # tokens before have no influence on what comes
        self._given = 0  # tokens before have been given out as text

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens and return the text that they complete, "" if they complete none."""
        self._token_ids.extend(token_ids)
        return self._advance(is_end=False)

    def finish(self) -> str:
        """Return what was held back: the answer has ended."""
        return self._advance(is_end=True)

    def _advance(self, *, is_end: bool) -> str:
        if self._given == len(self._token_ids):
            return ""
        before = self._decode(self._window, self._given)
        after = self._decode(self._window, len(self._token_ids))
        is_held_long = len(self._token_ids) - self._given > _MAX_HELD_TOKENS
        if after.endswith(_INCOMPLETE) and not is_end and not is_held_long:
            return ""
        if len(after) <= len(before) and not is_end:
            return ""  # special tokens, or a token that only changes with the next one
        self._window = self._given
        self._given = len(self._token_ids)
        return after[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(
            self._token_ids[start:end], skip_special_tokens=self._skip_special_tokens
        )
