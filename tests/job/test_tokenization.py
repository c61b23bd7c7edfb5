"""Long texts tokenized in pieces are tokenized as a whole, and texts over a bound not at all."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from cbgen.errors import RowError
from cbgen.job.tokenization import MAX_UNBROKEN, PromptLimit, PromptTokenizer

PIECE = 1500
DOCS = Path(__file__).parents[2] / "docs"

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_like(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip


BYTE_LEVEL = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "gpt2-prefix": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "smollm2": pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]),
    "llama3": split_like(LLAMA3),
    "qwen2": split_like(QWEN2),
    "o200k": split_like(O200K),
    "unsplit": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
}  # fmt: skip
NAMES = [*BYTE_LEVEL, "llama2", "gemma", "metaspace", "unigram", "bert"]
BOUNDED = [*BYTE_LEVEL, "llama2", "gemma", "metaspace"]


@cache
def corpus() -> str:
    return "\n".join(path.read_text() for path in sorted(DOCS.glob("*.md"))[:6])


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    bytes_as_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>", "<|im_start|>"]
    if name in BYTE_LEVEL:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = BYTE_LEVEL[name]
        if name == "qwen2":
            made.normalizer = normalizers.NFC()
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=900,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    elif name == "unigram":
        made = Tokenizer(models.Unigram())
        made.normalizer = normalizers.Sequence([
            normalizers.NFKC(),
            normalizers.Replace(Regex(" {2,}"), " "),
        ])  # fmt: skip
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=500, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    elif name == "bert":
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer = normalizers.BertNormalizer()
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(
            vocab_size=600, special_tokens=special, show_progress=False
        )
    else:
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        trainer = trainers.BpeTrainer(
            vocab_size=900, special_tokens=special + bytes_as_tokens, show_progress=False
        )
        made.pre_tokenizer = pre_tokenizers.Metaspace()  # so that no entry spans two words
    made.train_from_iterator(corpus().splitlines(), trainer)
    if name in ("llama2", "gemma"):
        prepends = [normalizers.Prepend("▁")] if name == "llama2" else []
        made.normalizer = normalizers.Sequence([*prepends, normalizers.Replace(" ", "▁")])
        made.pre_tokenizer = None
    numbers = {token: made.token_to_id(token) for token in special}
    ends = "" if name == "gpt2" else " </s>"
    made.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=True),
        processors.TemplateProcessing(
            single="<s> $A" + ends, special_tokens=[("<s>", numbers["<s>"]), ("</s>", 2)]
        ),
    ])  # fmt: skip
    made.add_tokens([AddedToken("<tool>", rstrip=name == "gemma"), AddedToken("two words")])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


@cache
def sources() -> list[str]:
    """Stretches of text of many kinds, from a character to some hundreds."""
    rng = random.Random(0)
    text = corpus()
    stretches = [text[at : at + 400] for at in range(0, 60_000, 1500)]
    stretches += [
        "1234567890" * 40,
        "x" * 500,
        " " * 300,
        "\n\n\n",
        "don't we'll I'm 's",
        "\t \r\n",
    ]
    stretches += [
        "日本語のテキスト。これは文です。" * 9,
        "e\u0301a\u0308 \u1100\u1161\u11a8" * 20,
        "…—",
    ]
    stretches += ["\U0001f469\u200d\U0001f467", "\u0627\u0644\u0639" * 30, "\u2028", "ǅ ﬁ ㍿ Å İ"]
    stretches += [
        "<|im_start|>user\n",
        "<tool>   \n  ",
        "two words",
        "<s>",
        "=" * 200,
        "a1b2c3 " * 40,
    ]
    rng.shuffle(stretches)
    return stretches


texts = st.builds(
    lambda seed, size: "".join(random.Random(seed).choices(sources(), k=size)),
    st.integers(0, 2**32),
    st.integers(8, 50),
)


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [("left", [3, 4, 5, 6, 7]), ("right", [0, 1, 2, 3, 4]), ("middle", [0, 1, 2, 6, 7])],
)
def test_a_limit_keeps_the_other_side(truncation, expected):
    assert PromptLimit(5, truncation).cut(list(range(8))) == expected
    assert PromptLimit(8, truncation).cut(list(range(8))) == list(range(8))
    assert len(PromptLimit(1, truncation).cut(list(range(8)))) == 1


def test_a_long_prompt_is_an_error_unless_truncation_is_asked_for():
    with pytest.raises(RowError, match="8 tokens, and at most 5"):
        PromptLimit(5, "error").cut(list(range(8)))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(
    text=texts,
    truncation=st.sampled_from(["error", "left", "right", "middle"]),
    share=st.floats(0.001, 1.1),
    adds=st.booleans(),
)
def test_pieces_make_the_tokens_of_the_whole_text(name, text, truncation, share, adds):
    whole = tokenizer(name)(text, add_special_tokens=adds)["input_ids"]
    limit = PromptLimit(max(1, int(share * len(whole))), truncation)
    (result,) = PromptTokenizer(tokenizer(name), piece=PIECE).encode(
        [text], [limit], add_special_tokens=adds
    )
    try:
        expected = limit.cut(whole)
    except RowError:
        assert isinstance(result, RowError)
        assert result.code == "prompt_too_long"
    else:
        assert result == expected


@pytest.mark.parametrize("name", [name for name in NAMES if name != "unsplit"])
def test_a_long_text_goes_in_pieces(name, monkeypatch):
    sizes = []
    real = tokenizer(name)
    call = type(real).__call__
    monkeypatch.setattr(
        type(real),
        "__call__",
        lambda self, text, **options: (
            sizes.append(len(text if isinstance(text, str) else "".join(text))),
            call(self, text, **options),
        )[1],
    )
    text = corpus() * 3
    for truncation in ("left", "right", "middle"):
        sizes.clear()
        PromptTokenizer(real, piece=PIECE).encode(
            [text], [PromptLimit(50, truncation)], add_special_tokens=True
        )
        assert max(sizes) < 3 * PIECE
        assert sum(sizes) < 6 * PIECE


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(text=texts)
def test_no_text_has_fewer_tokens_than_the_bound(name, text):
    bound = PromptTokenizer(tokenizer(name)).fewest_tokens(text)
    assert bound <= len(tokenizer(name)(text, add_special_tokens=False)["input_ids"])
    assert (bound > 0) == (name in BOUNDED)


def test_texts_over_the_bound_are_refused_untokenized():
    limit = PromptLimit(256, "error")
    (result,) = PromptTokenizer(_Untouched(tokenizer("llama3"))).encode(
        ["word " * 2**20], [limit], add_special_tokens=True
    )
    assert isinstance(result, RowError)
    assert result.code == "prompt_too_long"
    assert "at least" in result.message


def test_short_texts_go_in_groups_of_a_bounded_size():
    texts = ["word " * 100] * 64
    results = PromptTokenizer(tokenizer("gpt2"), piece=PIECE).encode(
        texts, [PromptLimit(10_000, "error")] * 64, add_special_tokens=False
    )
    assert results == tokenizer("gpt2")(texts, add_special_tokens=False)["input_ids"]


def test_a_long_text_without_a_place_to_cut_is_refused():
    (result,) = PromptTokenizer(tokenizer("gpt2")).encode(
        ["x" * (MAX_UNBROKEN + 2**19)], [PromptLimit(10, "left")], add_special_tokens=False
    )
    assert isinstance(result, RowError)
    assert "shorten it" in result.message


class _Untouched:
    """A tokenizer that is asked for its vocabulary only."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.backend_tokenizer = tokenizer.backend_tokenizer
