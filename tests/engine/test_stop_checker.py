"""Stop strings: found with the token that completes them, whatever the tokens are."""

from __future__ import annotations

from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbgen.engine.text import IncrementalDetokenizer, StopChecker, cut_text

SPECIAL = 0


class Pieces:
    """A tokenizer whose tokens are given bytes; token 0 is special."""

    def __init__(self, *pieces: bytes | str) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    @property
    def ids(self) -> list[int]:
        return list(range(1, len(self.pieces) + 1))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        special = b"" if skip_special_tokens else b"<s>"
        parts = [self.pieces[token - 1] if token else special for token in token_ids]
        return b"".join(parts).decode("utf-8", "replace")


def follow(pieces: list[bytes | str], *stop_strings: str) -> tuple[str, str | None, int]:
    """Return the text that is given out, the stop string, and the tokens until it was found."""
    tokenizer = Pieces(*pieces)
    checker = StopChecker(tokenizer, stop_strings)
    text = ""
    for token in tokenizer.ids:
        text += checker.push([token], is_last=token == len(pieces))
        if checker.stop_string is not None:
            return text, checker.stop_string, token
    return text, None, len(pieces)


SMILE = "🙂".encode()


@pytest.mark.parametrize(
    ("pieces", "stop_strings", "wanted"),
    [
        (["one", " two; three"], [";"], ("one two", ";", 2)),
        (["a ST", "O", "P b"], ["STOP"], ("a ", "STOP", 3)),
        (["ab", "ab", "c"], ["abc"], ("ab", "abc", 3)),
        (["a", SMILE[:1], SMILE[1:3], SMILE[3:], "b"], ["🙂"], ("a", "🙂", 4)),
        # The string is there before the character behind it is complete.
        (["a", b"b" + SMILE[:1], SMILE[1:]], ["ab"], ("", "ab", 2)),
        ([b"a" + SMILE[:2], SMILE[2:] + b"b", "c"], ["🙂b"], ("a", "🙂b", 2)),
        # Several that are complete at once: the one that begins first, then the shortest.
        (["x one two"], ["two", "one"], ("x ", "one", 1)),
        (["x abc"], ["abc", "ab"], ("x ", "ab", 1)),
        # Of two, the one that is complete first ends the answer.
        (["abc", "d"], ["abcd", "c"], ("ab", "c", 1)),
        (["no", " stop"], ["END"], ("no stop", None, 2)),
        (["almost EN"], ["END"], ("almost EN", None, 1)),
        (["end with half", SMILE[:2]], ["\ufffd"], ("end with half", "\ufffd", 2)),
        (["a", "b"], ["ab"], ("", "ab", 2)),
    ],
)
def test_a_stop_string_is_found(pieces, stop_strings, wanted):
    assert follow(pieces, *stop_strings) == wanted


def test_text_that_may_become_a_stop_string_is_held_back():
    tokenizer = Pieces("a\n", "\n", "\nb", "c\n")
    checker = StopChecker(tokenizer, ["\n\n\n\n", "xyz"])
    given = [checker.push([token], is_last=token == 4) for token in tokenizer.ids]
    assert given == ["a", "", "\n\n\nb", "c\n"]


def test_nothing_is_given_out_after_a_stop_string():
    tokenizer = Pieces("a;b", "c")
    checker = StopChecker(tokenizer, [";"])
    assert checker.push([1]) == "a"
    assert checker.push([2], is_last=True) == ""
    assert checker.stop_string == ";"


def test_special_tokens_are_part_of_the_text_where_they_are_not_skipped():
    tokenizer = Pieces("a")
    for skips, wanted in ((True, None), (False, "a<s>")):
        checker = StopChecker(tokenizer, ["a<s>"], skip_special_tokens=skips)
        checker.push([1, SPECIAL], is_last=True)
        assert checker.stop_string == wanted


def test_a_whole_text_is_cut_before_the_stop_string():
    assert cut_text("a;b;c", ";") == "a"
    assert cut_text("a;b;c", None) == "a;b;c"
    assert cut_text("a", ";") == "a"


LETTERS = st.sampled_from(["a", "b", "é", "🙂"])
CUT_TEXTS = st.tuples(st.text(LETTERS, max_size=30), st.lists(st.integers(1, 6), max_size=80)).map(
    lambda given: cut_bytes(given[0].encode(), given[1])
)
BROKEN_TEXTS = st.lists(
    st.sampled_from([b"a", b"b", "é".encode(), b"\xf0", b"\x9f\x99", b"\x82", b"\xc3", b"a\xc3"]),
    max_size=60,
)


def cut_bytes(text: bytes, sizes: list[int]) -> list[bytes]:
    """Return a text in tokens of these sizes, the rest as one."""
    tokens = []
    for size in sizes:
        tokens.append(text[:size])
        text = text[size:]
    return [token for token in [*tokens, text] if token]


def naive_answer(pieces: list[bytes], stop_strings: list[str]) -> tuple[str, str | None, int]:
    """Decode everything after each token and look."""
    tokenizer = Pieces(*pieces)
    text = ""
    for end in tokenizer.ids:
        text = tokenizer.decode(tokenizer.ids[:end], skip_special_tokens=True)
        found = [(text.find(stop), len(stop), stop) for stop in stop_strings if stop in text]
        if found:
            begin, _, first = min(found)
            return text[:begin], first, end
    return text, None, len(pieces)


@given(st.one_of(CUT_TEXTS, BROKEN_TEXTS), st.lists(st.text(LETTERS, min_size=1, max_size=4)))
def test_the_answer_is_that_of_a_search_in_the_whole_text_after_each_token(pieces, stop_strings):
    assert follow(pieces, *stop_strings) == naive_answer(pieces, stop_strings)


@given(BROKEN_TEXTS, st.integers(1, 7))
def test_pieces_of_any_bytes_join_to_the_text_of_all_tokens(pieces, size):
    tokenizer = Pieces(*pieces)
    detokenizer = IncrementalDetokenizer(tokenizer)
    groups = [tokenizer.ids[begin : begin + size] for begin in range(0, len(pieces), size)]
    text = "".join(detokenizer.push(group) for group in groups)
    text += detokenizer.push([], is_last=True)
    assert text == tokenizer.decode(tokenizer.ids, skip_special_tokens=True)


@pytest.mark.parametrize("piece", [b"a", b"\x82", b"\xf0", b"a\xf0", b"", "🙂".encode()])
def test_the_work_for_a_token_does_not_grow_with_the_answer(piece):
    most = 0

    class Spy(Pieces):
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            nonlocal most
            most = max(most, len(token_ids))
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    checker = StopChecker(Spy(piece), ["STOP"])
    for _ in range(500):
        checker.push([1])
    assert most <= 40


def test_a_long_stop_string_is_looked_for_once():
    tokenizer = Pieces("a" * 1000)
    checker = StopChecker(tokenizer, ["a" * 50_000 + "b", "a" * 40_000 + "c"])
    started = perf_counter()
    for _ in range(100):
        checker.push([1])
    assert perf_counter() - started < 10  # a search from each place anew would take hours
