"""Text of a growing answer: whole characters, and in the end the text of all tokens."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cbgen.engine.text import IncrementalDetokenizer

TEXTS = (
    "plain words",
    "  spaces  at   odd  places ",
    "Grüße aus Köln",
    "你好 世界",
    "🙂🏽👨‍👩‍👧 family",
    "line\nbreak\ttab",
    "don't , stop !",
    "e\u0301 combining",
    "",
)


@pytest.fixture(scope="module")
def byte_level(checkpoint):
    return PreTrainedTokenizerFast.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def byte_fallback():
    """A tokenizer as sentencepiece makes them: words with a leading mark, bytes for the rest."""
    pieces = ["<s>", "</s>", "<unk>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", "▁plain", "▁words", "wor", "ds", *"abcdefghijklmnopqrstuvwxyzGK,.!'"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:3]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", clean_up_tokenization_spaces=False
    )


def pieces_of(tokenizer, token_ids, size: int = 1, **options) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    pieces = [
        detokenizer.push(token_ids[begin : begin + size])
        for begin in range(0, len(token_ids), size)
    ]
    return [*pieces, detokenizer.push([], is_last=True)]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_join_to_the_text_of_all_tokens(request, kind, text, size):
    tokenizer = request.getfixturevalue(kind)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, token_ids, size)
    assert "".join(pieces) == tokenizer.decode(token_ids)
    assert "\ufffd" not in "".join(pieces)


def test_a_character_comes_with_its_last_token(byte_level):
    token_ids = byte_level.encode("a🙂b")
    assert pieces_of(byte_level, token_ids) == ["a", "", "", "", "🙂", "b", ""]


def test_a_word_keeps_the_space_before_it(byte_fallback):
    token_ids = byte_fallback.convert_tokens_to_ids(["▁plain", "▁words"])
    assert pieces_of(byte_fallback, token_ids) == ["plain", " words", ""]


def test_special_tokens_are_left_out_or_not(byte_level):
    token_ids = [*byte_level.encode("hi"), byte_level.eos_token_id]
    assert "".join(pieces_of(byte_level, token_ids)) == "hi"
    assert "".join(pieces_of(byte_level, token_ids, skip_special_tokens=False)) == "hi</s>"


def test_an_end_inside_of_a_character_is_given_as_the_tokenizer_decodes_it(byte_level):
    token_ids = byte_level.encode("a🙂")[:3]
    pieces = pieces_of(byte_level, token_ids)
    assert pieces[:3] == ["a", "", ""]
    assert "".join(pieces) == byte_level.decode(token_ids)


def test_bytes_that_never_become_characters_are_given_after_a_while(byte_level):
    lone_byte = byte_level.encode("🙂")[1]  # a continuation byte
    token_ids = [lone_byte] * 60
    detokenizer = IncrementalDetokenizer(byte_level)
    given = "".join(detokenizer.push([token]) for token in token_ids)
    assert len(given) > 30
    assert given + detokenizer.push([], is_last=True) == byte_level.decode(token_ids)


def test_the_work_for_a_token_does_not_grow_with_the_answer(byte_level):
    lengths: list[int] = []

    class Spy:
        def decode(self, token_ids, *, skip_special_tokens):
            lengths.append(len(token_ids))
            return byte_level.decode(token_ids, skip_special_tokens=skip_special_tokens)

    pieces_of(Spy(), byte_level.encode("Grüße, 你好 🙂 " * 50))
    assert max(lengths) <= 10
