"""Text of a growing answer, piece by piece, never half a character.

Tokens are not characters: a token may hold one byte of a character of four, and what a token reads
as can depend on the one before it (word beginnings, merged spaces). So each piece is the difference
of two decodings of a window that begins a few tokens earlier, and an incomplete character at the
end is held back. The windows are those of Hugging Face's text-generation-inference
(`prefix_offset`, `read_offset`) and vLLM's incremental detokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_INCOMPLETE = "\ufffd"
_MAX_HELD_TOKENS = 16
"""What stays unreadable for longer is not going to be a character; holding on to it would make the
window grow with the answer."""
_MAX_CHARACTER_TOKENS = 4
"""A character has at most 4 bytes."""


class TokenDecoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""


class IncrementalDetokenizer:
    """Owns the place up to which an answer has been given out as text.

    The pieces joined are `tokenizer.decode(all ids)`, for tokenizers that decode a text from left
    to right (all byte-level ones; sentencepiece ones but for an answer that ends inside of a
    character). The work for a token does not grow with the answer.

    Args:
        tokenizer: decodes; is not changed.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: TokenDecoder, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # tokens before it have no influence on what comes
        self._num_given = 0  # tokens of the window whose text has been given out in full
        self._given = ""  # their text
        self._num_ahead = 0  # characters that have been given out of the tokens behind them

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens and return the text that they complete, "" if they complete none."""
        self._window.extend(token_ids)
        return self._advance(is_end=False)

    def finish(self) -> str:
        """Return what was held back: the answer has ended."""
        return self._advance(is_end=True)

    def _advance(self, *, is_end: bool) -> str:
        num_held = len(self._window) - self._num_given
        if num_held == 0:
            return ""
        text = self._decode(self._window)
        if is_end:
            return text[len(self._given) + self._num_ahead :]
        if len(text) > len(self._given) and not text.endswith(_INCOMPLETE):
            return self._give(text, len(self._window))
        if num_held > _MAX_HELD_TOKENS:
            # Only the last tokens can still be part of a character.
            end = len(self._window) - (_MAX_CHARACTER_TOKENS - 1)
            return self._give(self._decode(self._window[:end]), end)
        piece = text.rstrip(_INCOMPLETE)[len(self._given) + self._num_ahead :]
        self._num_ahead += len(piece)
        return piece

    def _give(self, text: str, end: int) -> str:
        """Give out the window's tokens before `end`, whose text this is."""
        given = len(self._given) + self._num_ahead
        piece = text[given:]
        if len(text) > len(self._given):
            del self._window[: self._num_given]
            self._num_given = end - self._num_given
            self._given = self._decode(self._window[: self._num_given])
            self._num_ahead = given + len(piece) - len(text)
        else:  # skipped special tokens, which have no influence on what comes
            del self._window[self._num_given : end]
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
