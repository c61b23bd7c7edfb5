"""Token ids to text while an answer grows, and the stop strings in it, in linear work.

Tokens are not characters: a token may hold one byte of a character of four, and what a token reads
as can depend on the one before it (word beginnings, merged spaces). So each piece of text is the
difference of two decodings of a window that begins a few tokens earlier, and an incomplete
character at the end is held back. The windows are those of Hugging Face's text-generation-inference
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
    character).

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
        self._num_ahead = 0  # characters given out already of tokens that are not complete yet

    def push(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """Take new tokens and return the text that they complete, of the last ones the rest."""
        self._window.extend(token_ids)
        num_held = len(self._window) - self._num_given
        if num_held == 0:
            return ""
        text = self._decode(self._window)
        if is_last:
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


class StopChecker:
    """Follows the text of one answer until a stop string stands in it.

    An answer ends with the first token after whose text a stop string stands in it. Of several that
    stand there then, the one that begins first counts; of those that begin together, the shortest,
    which ends the answer however its characters are cut into tokens.

    Args:
        tokenizer: decodes; is not changed.
        stop_strings: what ends the answer; with none the text is only given out piece by piece.
        skip_special_tokens: leave special tokens out of the text, so that none is found in it.

    Attributes:
        stop_string: the stop string that was found; nothing is given out and looked at after it.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        stop_strings: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self.stop_string: str | None = None
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens
        )
        self._stop_strings = stop_strings
        self._most_held = max(map(len, stop_strings), default=1) - 1
        self._held = ""  # text in which a stop string may have begun

    def push(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """Take new tokens.

        Args:
            token_ids: the tokens.
            is_last: whether the answer ends with them, so that no text is held back.

        Returns:
            Text that was not given out before: none of a stop string, none behind it, and before
            the end none in which a stop string may have begun.
        """
        if self.stop_string is not None:
            return ""
        # Whatever may become a stop string is held, so a search in what was given out is needless.
        text = self._held + self._detokenizer.push(token_ids, is_last=is_last)
        found = [(text.find(stop), len(stop), stop) for stop in self._stop_strings if stop in text]
        if found:
            begin, _, self.stop_string = min(found)
            return text[:begin]
        certain = len(text) if is_last else self._first_begin(text)
        self._held = text[certain:]
        return text[:certain]

    def _first_begin(self, text: str) -> int:
        """Return where in a text the first stop string may have begun, else its end."""
        for begin in range(max(0, len(text) - self._most_held), len(text)):
            rest = text[begin:]
            for stop in self._stop_strings:
                if stop.startswith(rest):
                    return begin
        return len(text)


def cut_text(text: str, stop_string: str | None) -> str:
    """Return the text of a whole answer before its stop string."""
    return text if stop_string is None else text.partition(stop_string)[0]
