"""Texts to token ids, with work and memory in proportion to what may be kept of them.

A tokenizer takes about 200 bytes of memory for each character that it is given at once. So a text
is looked at before it is tokenized (`fewest_tokens`), texts go to the tokenizer in groups of a
bounded size, and a long text goes to it in pieces, from the side that stays, until enough tokens
are there. The ids are those of the whole text tokenized at once and cut then.

A text may be cut between two characters where no token of the whole text spans both, and where
what follows is split into words as in the whole text. Two proofs are used:

- Words are found by a scan from left to right, and a scan depends on where it began only until it
  meets a boundary of the other one. Where scans from each of the first characters of a window agree
  on a boundary many words later, the scan of the whole text has it too.
- A tokenizer that does not split words (SentencePiece's) makes tokens of neighbours only; where
  no entry of the vocabulary holds two characters side by side, no token spans them.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import Any, Literal, TypeAlias

from tokenizers import PreTokenizedString, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from cbgen.errors import RowError

Truncation: TypeAlias = Literal["error", "left", "right", "middle"]

PIECE = 2**18
"""Characters that are tokenized at once: about 50 MB."""
MAX_UNBROKEN = 2**22
"""Characters without a place to cut that are tokenized at once: about 0.8 GB."""

_WINDOW = 1024
"""Characters in which a place to cut is looked for; half of them lie before it."""
_NUM_STARTS = 32
"""Scans that must agree, from each of the first characters of a window."""
_FEWEST_WORDS = 8
"""Boundaries before a place to cut: no word of the whole text spans so many others."""
_LOOKAHEAD = 128
"""Characters behind a place to cut that decide whether a word ends there."""

_SHRINKING = {"Prepend": 1, "NFD": 1, "NFC": 3, "NFKD": 4, "NFKC": 4, "Lowercase": 3}
"""Known normalizers: how many bytes, or characters, may become one."""


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """How many tokens a prompt may have, and what happens to those beyond."""

    max_tokens: int
    truncation: Truncation

    def cut(self, prompt_ids: list[int]) -> list[int]:
        """Return what stays of a prompt.

        Raises:
            RowError: it is longer, and is not to be truncated.
        """
        excess = len(prompt_ids) - self.max_tokens
        if excess <= 0:
            return prompt_ids
        match self.truncation:
            case "left":
                return prompt_ids[excess:]
            case "right":
                return prompt_ids[: self.max_tokens]
            case "middle":
                head = self.max_tokens - self.max_tokens // 2
                return prompt_ids[:head] + prompt_ids[head + excess :]
        raise self.too_long(str(len(prompt_ids)))

    def too_long(self, num_tokens: str) -> RowError:
        """Return the error of a prompt that has so many tokens."""
        return RowError(
            "prompt_too_long",
            f"the prompt has {num_tokens} tokens, and at most {self.max_tokens} are allowed; "
            "shorten it, or set prompt.truncation to left, right or middle",
            type="invalid_request",
        )


class PromptTokenizer:
    """Tokenizes the texts of prompts, each cut to its limit.

    Args:
        tokenizer: of the model; one that is not fast is given long texts as they are.
        piece: characters that are given to it at once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, piece: int = PIECE) -> None:
        self._tokenizer = tokenizer
        self._piece = piece
        self._places = _Places(tokenizer)

    def encode(
        self, texts: Sequence[str], limits: Sequence[PromptLimit], *, add_special_tokens: bool
    ) -> list[list[int] | RowError]:
        """Return the token ids of each text, or why it has none."""
        results: list[list[int] | RowError] = [[] for _ in texts]
        groups: list[list[int]] = []
        num_characters = 0
        for place, (text, limit) in enumerate(zip(texts, limits, strict=True)):
            if limit.truncation == "error" and len(text) > limit.max_tokens:
                fewest = self.fewest_tokens(text)
                if fewest > limit.max_tokens:
                    results[place] = limit.too_long(f"at least {fewest}")
                    continue
            if len(text) > 4 * self._first_piece(limit.max_tokens):
                results[place] = self._encode_long(text, limit, add_special_tokens)
                continue
            num_characters += len(text)
            if not groups or num_characters > self._piece:
                groups.append([])
                num_characters = len(text)
            groups[-1].append(place)
        for group in groups:
            encoded = self._encode([texts[place] for place in group], add_special_tokens)
            for place, item in zip(group, encoded, strict=True):
                results[place] = _cut(item, limits[place])
        return results

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the text's tokens, without tokenizing it.

        Where the tokenizer may drop characters, or make one token of any number of them, it is 0.
        """
        entry = self._longest_entry
        if entry is None:
            return 0
        if entry.spaces_may_go:
            text = "".join(text.split())
        size = len(text.encode("utf-8", "surrogatepass")) if entry.is_in_bytes else len(text)
        return -(-size // entry.size)

    @cached_property
    def _longest_entry(self) -> _LongestEntry | None:
        return _longest_entry(self._tokenizer)

    def _encode(self, texts: list[str], add_special_tokens: bool) -> Sequence[list[int] | RowError]:
        try:
            encoded: list[list[int]] = self._tokenizer(
                texts, add_special_tokens=add_special_tokens, verbose=False
            )["input_ids"]
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            if len(texts) == 1:
                return [_failed(error)]
            return [self._encode([text], add_special_tokens)[0] for text in texts]
        return encoded

    def _encode_long(
        self, text: str, limit: PromptLimit, add_special_tokens: bool
    ) -> list[int] | RowError:
        """Tokenize piece by piece as much as stays, or as shows that the text is too long."""
        try:
            first, last = self._special_tokens if add_special_tokens else ([], [])
            if limit.truncation == "left":
                return limit.cut(self._end(text, limit.max_tokens, first, last))
            pieces = self._pieces(text, limit.max_tokens)
            parts = _enough(chain([first], pieces, [last]), limit.max_tokens)
            prompt_ids = list(chain.from_iterable(parts))
            if len(prompt_ids) <= limit.max_tokens or limit.truncation == "right":
                return limit.cut(prompt_ids)
            if limit.truncation == "error":
                return limit.too_long(f"more than {limit.max_tokens}")
            num_last = limit.max_tokens // 2
            end = self._end(text, num_last, first, last)
            return prompt_ids[: limit.max_tokens - num_last] + end[len(end) - num_last :]
        except RowError as error:
            return error
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            return _failed(error)

    def _end(self, text: str, num_tokens: int, first: list[int], last: list[int]) -> list[int]:
        """Return the last tokens, more than `num_tokens` if there are so many."""
        pieces = self._pieces_from_right(text, num_tokens)
        parts = _enough(chain([last], pieces, [first]), num_tokens)
        return list(chain.from_iterable(reversed(parts)))

    @cached_property
    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer adds before and behind a text."""
        plain = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        ids = self._tokenizer("a", add_special_tokens=True)["input_ids"]
        for start in range(len(ids) - len(plain) + 1):
            if ids[start : start + len(plain)] == plain:
                return ids[:start], ids[start + len(plain) :]
        raise ValueError("the tokenizer changes a text to which it adds special tokens")

    def _first_piece(self, num_tokens: int) -> int:
        """Return how many characters to tokenize first where so many tokens are wanted."""
        return min(self._piece, max(4 * _WINDOW, 8 * num_tokens))

    def _pieces(self, text: str, num_tokens: int) -> Iterator[list[int]]:
        """Yield the ids of the text's pieces from left to right."""
        start = _Place(0, 0)
        size = self._first_piece(num_tokens)
        while start.position < len(text):
            end = self._places.first(text, start.position + size, len(text))
            yield self._encode_piece(text, start, end.position)
            start = end
            size = min(2 * size, self._piece)

    def _pieces_from_right(self, text: str, num_tokens: int) -> Iterator[list[int]]:
        """Yield the ids of the text's pieces from right to left."""
        end = len(text)
        size = self._first_piece(num_tokens)
        while end > 0:
            reach = size
            while (start := self._places.first(text, end - reach, end)).position == end:
                reach *= 2
            yield self._encode_piece(text, start, end)
            end = start.position
            size = min(2 * size, self._piece)

    def _encode_piece(self, text: str, start: _Place, end: int) -> list[int]:
        """Return the ids between two places, tokenized with what stands around them.

        Raises:
            RowError: there are more than `MAX_UNBROKEN` characters.
        """
        if end - start.position > MAX_UNBROKEN:
            raise RowError(
                "tokenization_failed",
                f"the prompt has {len(text)} characters and, from character {start.position}, none "
                f"of {MAX_UNBROKEN} where it could be cut to be tokenized; shorten it",
            )
        is_whole = end - start.position == len(text)
        context = text[start.scanned_from : end + _LOOKAHEAD]
        encoded = self._tokenizer(
            context, add_special_tokens=False, verbose=False, return_offsets_mapping=not is_whole
        )
        ids: list[int] = encoded["input_ids"]
        if is_whole:
            return ids
        # A token that begins in the piece is its token: none spans a place. Offsets leave out white
        # space at the ends of a token, and no place has white space before it.
        lower = start.position - start.scanned_from
        upper = end - start.scanned_from if end < len(text) else len(context) + 1
        begins = (begin for begin, _ in encoded["offset_mapping"])
        return [token for token, begin in zip(ids, begins, strict=True) if lower <= begin < upper]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a text may be cut, and from where on its words are to be scanned to find it."""

    position: int
    scanned_from: int


class _Places:
    """Finds the places where texts may be cut, for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend: Tokenizer | None = backend if isinstance(backend, Tokenizer) else None
        self._joins_with_space = cache(self._may_join_with_space)

    def first(self, text: str, position: int, stop: int) -> _Place:
        """Return a place at or behind `position`; `stop`, which is one, if none is found before."""
        if position <= 0:
            return _Place(0, 0)
        if self._backend is not None:
            starts = range(max(0, position - _WINDOW // 2), stop - _WINDOW, _WINDOW // 2)
            for start in starts:
                found = self._first_in(text[start : start + _WINDOW])
                if found is not None:
                    return _Place(start + found, start)
        return _Place(stop, stop)

    def _first_in(self, window: str) -> int | None:
        if any(token in window for token in self._added_tokens):
            return None
        ends = self._ends_of_words(window) if self._splits_words else self._ends_unjoined(window)
        for end in sorted(ends):
            behind = window[end : end + 1]
            if (
                _WINDOW // 2 <= end <= _WINDOW - _LOOKAHEAD
                and not window[end - 1].isspace()
                and _are_apart(window[end - 1], behind)
            ):
                return end
        return None

    def _ends_of_words(self, window: str) -> set[int]:
        """Return where words end in a scan of the whole text, too."""
        agreed = {end for _, (_, end) in self._scan(window)}
        if sum(_NUM_STARTS <= end < _WINDOW // 2 for end in agreed) < _FEWEST_WORDS:
            return set()
        for start in range(1, _NUM_STARTS):
            agreed &= {start + end for _, (_, end) in self._scan(window[start:])}
            if not agreed:
                break
        return agreed

    def _ends_unjoined(self, window: str) -> set[int]:
        """Return the places before a space that no token joins with what is before it."""
        return {
            end
            for end in range(1, len(window))
            if window[end] == " " and not self._joins_with_space(window[end - 1])
        }

    @cached_property
    def _splits_words(self) -> bool:
        return len(self._scan("ab c. 12\n\nd, e")) > 1

    def _scan(self, text: str) -> list[tuple[str, tuple[int, int]]]:
        """Return words as normalized, and where each begins and ends in the text as it was."""
        assert self._backend is not None
        scanned = PreTokenizedString(text)
        normalizer, splitter = self._backend.normalizer, self._backend.pre_tokenizer
        if normalizer is not None:
            scanned.normalize(normalizer.normalize)
        if splitter is not None:
            splitter.pre_tokenize(scanned)
        splits = scanned.get_splits(offset_referential="original", offset_type="char")
        return [(word, place) for word, place, _ in splits]

    def _may_join_with_space(self, character: str) -> bool:
        """Whether an entry of the vocabulary may hold the character and a space behind it."""
        assert self._backend is not None
        normalized = "".join(word for word, _ in self._scan(f"a{character} a"))
        pairs = [character + space for space in " \u2581\u0120"]
        pair = next((pair for pair in pairs if normalized.endswith(f"a{pair}a")), None)
        return pair is None or any(pair in entry for entry in self._backend.get_vocab())

    @cached_property
    def _added_tokens(self) -> list[str]:
        assert self._backend is not None
        return [token.content for token in self._backend.get_added_tokens_decoder().values()]


@dataclass(frozen=True, slots=True)
class _LongestEntry:
    """The longest entry of a vocabulary of which no other may stand for more."""

    size: int
    """Bytes or characters of a text that one token may stand for."""
    is_in_bytes: bool
    spaces_may_go: bool
    """Whether tokens take any number of spaces around them."""


def _longest_entry(tokenizer: PreTrainedTokenizerBase) -> _LongestEntry | None:
    """Return the longest entry; None if a token may stand for a text of any length."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer) or not isinstance(backend.model, models.BPE):
        return None
    vocabulary = backend.get_vocab()
    splitters = _flat(_as_json(backend.pre_tokenizer), "pretokenizers")
    if any(map(_drops_text, splitters)):
        return None
    is_in_bytes = any(splitter["type"] == "ByteLevel" for splitter in splitters)
    if is_in_bytes:
        every_byte = set(pre_tokenizers.ByteLevel.alphabet())
    else:
        every_byte = {f"<0x{byte:02X}>" for byte in range(256)}
    model = backend.model
    # Otherwise characters that the vocabulary lacks go without a token, or many make one.
    if not (every_byte <= vocabulary.keys() and (is_in_bytes or model.byte_fallback)) and (
        model.unk_token is None or model.fuse_unk
    ):
        return None
    shrinks = 1
    for part in _flat(_as_json(backend.normalizer), "normalizers"):
        of_part = _shrinks(part)
        if of_part is None:
            return None
        shrinks *= of_part
    added = backend.get_added_tokens_decoder().values()
    return _LongestEntry(
        shrinks * max(map(len, vocabulary)),
        is_in_bytes,
        spaces_may_go=any(token.lstrip or token.rstrip for token in added),
    )


def _as_json(component: pre_tokenizers.PreTokenizer | normalizers.Normalizer | None) -> Any:  # noqa: ANN401
    """Return the JSON form of a part of a tokenizer; None if there is none."""
    return None if component is None else json.loads(component.__getstate__())


def _flat(component: dict[str, Any] | None, parts: str) -> list[dict[str, Any]]:
    """Return the parts of a component, those of a sequence one by one."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    return [flat for part in component[parts] for flat in _flat(part, parts)]


def _drops_text(splitter: dict[str, Any]) -> bool:
    """Whether a splitter into words may leave text out."""
    if splitter["type"] in ("Split", "Punctuation"):
        return bool(splitter["behavior"] == "Removed")
    return splitter["type"] not in ("ByteLevel", "Metaspace", "Digits")


def _shrinks(normalizer: dict[str, Any]) -> int | None:
    """Return how many bytes, or characters, a normalizer may make one; None = any number."""
    if normalizer["type"] == "Replace":
        replaced = normalizer["pattern"].get("String", "")
        return 1 if 0 < len(replaced) <= len(normalizer["content"]) else None
    return _SHRINKING.get(normalizer["type"])


def _are_apart(first: str, second: str) -> bool:
    """Whether normalization makes of two characters what it makes of each."""
    return unicodedata.combining(second) == 0 and all(
        unicodedata.normalize(form, first + second)
        == unicodedata.normalize(form, first) + unicodedata.normalize(form, second)
        for form in ("NFC", "NFKC")
    )


def _enough(parts: Iterable[list[int]], max_tokens: int) -> list[list[int]]:
    """Take parts until they have more than `max_tokens`."""
    taken: list[list[int]] = []
    num_tokens = 0
    for part in parts:
        taken.append(part)
        num_tokens += len(part)
        if num_tokens > max_tokens:
            break
    return taken


def _cut(prompt_ids: list[int] | RowError, limit: PromptLimit) -> list[int] | RowError:
    try:
        return prompt_ids if isinstance(prompt_ids, RowError) else limit.cut(prompt_ids)
    except RowError as error:
        return error


def _failed(error: Exception) -> RowError:
    return RowError("tokenization_failed", f"the prompt cannot be tokenized: {error}")
