"""Stop strings in a growing answer: which one ends it, and which text is certain to stay.

An answer ends with the first token after whose text a stop string stands in the answer. Of several
that stand there then, the one that begins first counts; of those that begin together, the shortest,
which ends the answer however its characters are cut into tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from cbgen.engine.text.detokenizer import IncrementalDetokenizer, TokenDecoder


class StopChecker:
    """Follows the text of one answer until a stop string stands in it.

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
        self._finders = [_Finder(text) for text in stop_strings]
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
        piece = self._detokenizer.push(token_ids)
        if is_last:
            piece += self._detokenizer.finish()
        text = self._held + piece
        found = []
        for finder in self._finders:
            end = finder.find(piece)
            if end is not None:
                found.append((len(self._held) + end - len(finder.text), len(finder.text), finder))
        if found:
            begin, _, first = min(found, key=lambda match: match[:2])
            self.stop_string = first.text
            return text[:begin]
        num_held = 0 if is_last else max((each.num_matched for each in self._finders), default=0)
        certain = len(text) - num_held
        self._held = text[certain:]
        return text[:certain]


class _Finder:
    """Finds one text in a stream, looking at each character once (Knuth, Morris and Pratt, 1977).

    Attributes:
        text: what it looks for.
        num_matched: characters of it with which the stream ends.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        # For each prefix: the length of its longest own beginning with which it also ends.
        self._borders = [0, 0]
        for character in text[1:]:
            border = self._longer(self._borders[-1], character)
            self._borders.append(border)

    def find(self, piece: str) -> int | None:
        """Read on; return the place in `piece` behind the first occurrence, None without one."""
        for place, character in enumerate(piece):
            self.num_matched = self._longer(self.num_matched, character)
            if self.num_matched == len(self.text):
                return place + 1
        return None

    def _longer(self, num_matched: int, character: str) -> int:
        """Return how much is matched after `character`."""
        while num_matched and self.text[num_matched] != character:
            num_matched = self._borders[num_matched]
        return num_matched + (self.text[num_matched] == character)


def cut_text(text: str, stop_string: str | None) -> str:
    """Return the text of a whole answer as far as it stays."""
    begin = -1 if stop_string is None else text.find(stop_string)
    return text if begin < 0 else text[:begin]
