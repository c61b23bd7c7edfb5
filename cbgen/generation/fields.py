"""The table of settings: what one request may say, in every dialect, and what becomes of it.

A row of the table holds for recipes, for rows, for a model's generation_config.json, for keyword
arguments in Python and, through its aliases, for request bodies of OpenAI's API and of vLLM. Names
and meanings are those of `transformers.GenerationConfig`; the fields of cbgen come last. A test
compares the table with the installed library.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from cbgen.engine.sampling.params import MAX_SEED, RANGES
from cbgen.values import ANY_NUMBER, Annotation, Plain, Range, is_union, nearest_name

GENERATION_SECTION = "generation_config"
"""Name of the fields' section in a recipe and of their object in a row."""

Endpoint = Literal["chat", "completions"]


class Support(Enum):
    """What becomes of a field that was given."""

    HONOURED = "honoured"
    """It does what it says."""
    NO_EFFECT = "no effect"
    """Any value of its type is accepted: it changes nothing for these models and rows."""
    NEUTRAL = "neutral only"
    """Accepted where it asks for nothing, else refused by name."""
    REFUSED = "refused"
    """Refused by name unless null."""


@dataclass(frozen=True, slots=True)
class Alias:
    """The name of a field in request bodies, and where a body differs in more than the name."""

    name: str
    endpoints: tuple[Endpoint, ...] = ("chat", "completions")
    range: Range | None = None
    convert: Callable[[Any], Plain] | None = None
    """From the body's value to the field's."""
    most_items: int | None = None
    """Length of a list in OpenAI's API; vLLM has no bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field, its values and its support; null is accepted for every one and means unset."""

    name: str
    type: Annotation
    support: Support
    doc: str = ""
    range: Range = ANY_NUMBER
    neutral: tuple[Plain, ...] = ()
    """Values that ask for nothing."""
    aliases: tuple[Alias, ...] = ()

    @property
    def takes_list(self) -> bool:
        """Whether the field may hold several values."""
        members = typing.get_args(self.type) if is_union(self.type) else (self.type,)
        return any(typing.get_origin(member) is list for member in members)


def honoured(
    name: str,
    kind: Annotation,
    doc: str = "",
    *,
    range: Range | None = None,
    aliases: tuple[Alias, ...] = (),
) -> Field:
    """Return a field that does what it says; its range is the engine's where none is given."""
    return Field(
        name=name,
        type=kind,
        support=Support.HONOURED,
        doc=doc,
        range=range or RANGES.get(name, ANY_NUMBER),
        aliases=aliases,
    )


def no_effect(name: str, kind: Annotation = Any, doc: str = "") -> Field:
    """Return a field that is accepted and changes nothing."""
    return Field(name=name, type=kind, support=Support.NO_EFFECT, doc=doc)


def neutral(
    name: str,
    kind: Annotation,
    *values: Plain,
    doc: str = "",
    aliases: tuple[Alias, ...] = (),
) -> Field:
    """Return a field that is accepted at these values alone."""
    return Field(
        name=name, type=kind, support=Support.NEUTRAL, doc=doc, neutral=values, aliases=aliases
    )


def refused(name: str, doc: str = "") -> Field:
    """Return a field that is not supported at any value."""
    return Field(name=name, type=Any, support=Support.REFUSED, doc=doc)


TokenIds = int | list[int]
Tokens = list[int]
_SAME_TOKENS_CACHES = ("dynamic", "static", "hybrid", "sliding_window", "paged")
"""Caches of the library that hold every key and value as it is."""
_BEST_TOKEN_ALONE = 1e-9
"""A top_p below every probability; bodies write 0 for it, which is no top_p elsewhere."""

_LIBRARY_FIELDS = (
    # Length of the answer
    honoured(
        "max_new_tokens",
        int,
        "Most tokens to generate; unset: what the context has.",
        aliases=(  # of two in one body the later one counts
            Alias("max_tokens"),
            Alias("max_completion_tokens", endpoints=("chat",)),
        ),
    ),
    honoured(
        "max_length",
        int,
        "Most tokens of prompt and answer; max_new_tokens wins.",
        range=Range(at_least=1),
    ),
    neutral("min_length", int, 0, doc="Fewest tokens of prompt and answer."),
    neutral(
        "min_new_tokens",
        int,
        0,
        doc="Fewest tokens to generate.",
        aliases=(Alias("min_tokens"),),
    ),
    neutral("early_stopping", bool | Literal["never"], False, doc="End of a beam search."),
    refused("max_time", "Seconds that one answer may take."),
    honoured(
        "stop_strings",
        str | list[str],
        "Texts that end the answer, which is cut before the first of them.",
        aliases=(Alias("stop", most_items=4),),
    ),
    # Strategy
    honoured(
        "do_sample",
        bool,
        "Sample, or take the best token; unset = sample if a temperature is given.",
    ),
    neutral("num_beams", int, 1, doc="Beam search."),
    neutral("use_mtp", bool, False, doc="Multi-token prediction."),
    # Cache
    neutral("use_cache", bool, True, doc="Reuse keys and values."),
    neutral("cache_implementation", str, *_SAME_TOKENS_CACHES, doc="Class of the cache."),
    neutral("cache_config", dict[str, Any], {}, doc="Settings of the cache class."),
    no_effect("max_cache_len", int, "Length of a static cache."),
    # Logits
    honoured(
        "temperature",
        float,
        "Divisor of the logits; 0 = greedy.",
        aliases=(Alias("temperature"),),
    ),
    honoured(
        "top_k",
        int,
        "Keep the k best tokens; 0 = off.",
        aliases=(Alias("top_k", range=Range(at_least=-1), convert=lambda k: 0 if k == -1 else k),),
    ),
    honoured(
        "top_p",
        float,
        "Keep the best tokens up to this probability; 1.0 = off.",
        aliases=(
            Alias(
                "top_p",
                range=Range(at_least=0, at_most=1),
                convert=lambda p: p or _BEST_TOKEN_ALONE,
            ),
        ),
    ),
    honoured(
        "min_p",
        float,
        "Keep tokens at least this many times as probable as the best; 0.0 = off.",
        aliases=(Alias("min_p"),),
    ),
    refused("top_h", "Sampling bounded by entropy."),
    neutral("typical_p", float, 1.0, doc="Locally typical sampling."),
    neutral("epsilon_cutoff", float, 0.0, doc="Epsilon sampling."),
    neutral("eta_cutoff", float, 0.0, doc="Eta sampling."),
    honoured(
        "repetition_penalty",
        float,
        "Above 1: tokens of prompt and answer become less probable; 1.0 = off.",
        aliases=(Alias("repetition_penalty"),),
    ),
    neutral(
        "encoder_repetition_penalty", float, 1.0, doc="Penalty on tokens outside of the prompt."
    ),
    neutral(
        "length_penalty",
        float,
        1.0,
        doc="Length penalty of a beam search.",
        aliases=(Alias("length_penalty"),),
    ),
    neutral("no_repeat_ngram_size", int, 0, doc="Length of token runs that may come once only."),
    neutral("bad_words_ids", list[list[int]], [], doc="Token runs that are not allowed."),
    neutral("renormalize_logits", bool, False, doc="Normalize the logits after processing."),
    refused("forced_bos_token_id", "First token of every answer."),
    refused("forced_eos_token_id", "Last token of an answer that reaches max_length."),
    neutral("remove_invalid_values", bool, False, doc="Replace NaN and infinity in the logits."),
    refused("exponential_decay_length_penalty", "Growing push towards the end."),
    neutral("suppress_tokens", Tokens, [], doc="Tokens that are not allowed."),
    neutral("begin_suppress_tokens", Tokens, [], doc="Tokens that are not allowed at the start."),
    neutral("sequence_bias", list[Any] | dict[str, Any], [], {}, doc="Bias on token runs."),
    neutral("token_healing", bool, False, doc="Replace the tail of the prompt."),
    neutral("guidance_scale", float, 1.0, doc="Classifier-free guidance."),
    refused("watermarking_config", "Watermark in the answer."),
    # Output of generate()
    honoured(
        "num_return_sequences",
        int,
        "Samples of each row; above 1 the row must sample and its answers are in `choices`.",
        range=Range(at_least=1, at_most=128),  # as in OpenAI's API
        aliases=(Alias("n"),),
    ),
    neutral("output_attentions", bool, False, doc="Return attention weights."),
    neutral("output_hidden_states", bool, False, doc="Return hidden states."),
    neutral("output_scores", bool, False, doc="Return processed logits."),
    neutral("output_logits", bool, False, doc="Return logits."),
    neutral("return_dict_in_generate", bool, False, doc="Python type that generate() returns."),
    # Special tokens
    no_effect("pad_token_id", TokenIds, "Padding token; nothing is padded."),
    no_effect("bos_token_id", TokenIds, "First token of a prompt; the tokenizer decides."),
    honoured(
        "eos_token_id",
        TokenIds,
        "Tokens that end an answer, in place of the model's own.",
        range=Range(at_least=0),
    ),
    # Encoder-decoder models
    neutral(
        "encoder_no_repeat_ngram_size", int, 0, doc="Length of prompt runs that may not come again."
    ),
    no_effect("decoder_start_token_id", TokenIds, "First token of a decoder beside an encoder."),
    # Assisted generation
    neutral("is_assistant", bool, False, doc="Be the assistant of another model."),
    neutral("num_assistant_tokens", int, 20, 5, doc="Tokens that an assistant drafts."),
    neutral(
        "num_assistant_tokens_schedule", str, "constant", doc="Change of num_assistant_tokens."
    ),
    neutral("assistant_confidence_threshold", float, 0.4, doc="Confidence that a draft needs."),
    refused("prompt_lookup_num_tokens", "Tokens drafted from the prompt."),
    refused("max_matching_ngram_size", "Longest run looked up in the prompt."),
    refused("assistant_early_exit", "Layer that drafts."),
    neutral("assistant_lookbehind", int, 10, doc="Tokens matched between tokenizers."),
    neutral("target_lookbehind", int, 10, doc="Tokens matched between tokenizers."),
    refused("assistant_ensemble_weight", "Weight of the assistant's distribution."),
    refused("speculation_type", "Kind of speculative decoding."),
    # Performance
    refused("compile_config", "torch.compile settings."),
    neutral("disable_compile", bool, True, False, doc="Keep torch.compile off."),
    refused("continuous_batching_config", "Give it as a section of its own."),
    # Kept by the library for old files
    neutral("low_memory", bool, False, doc="Contrastive search in steps."),
    neutral("penalty_alpha", float, 0.0, doc="Contrastive search."),
    refused("dola_layers", "Decoding by contrasting layers."),
    neutral("diversity_penalty", float, 0.0, doc="Group beam search."),
    neutral("num_beam_groups", int, 1, doc="Group beam search."),
    neutral("constraints", list[Any], [], doc="Constrained beam search."),
    neutral("force_words_ids", list[Any], [], doc="Words that must come."),
    refused("prefill_chunk_size", "See max_batch_tokens in continuous_batching_config."),
    no_effect("transformers_version", str, "Version that wrote the file."),
)

_OWN_FIELDS = (
    honoured(
        "seed",
        int,
        "Seed of the run; a row's own stands in place of (run seed, id).",
        aliases=(
            Alias(
                "seed",
                range=Range(at_least=-MAX_SEED - 1, at_most=MAX_SEED),
                convert=lambda seed: seed % (MAX_SEED + 1),
            ),
        ),
    ),
    honoured(
        "stop_token_ids",
        Tokens,
        "Tokens that end an answer, beside eos_token_id.",
        range=Range(at_least=0),
        aliases=(Alias("stop_token_ids"),),
    ),
    honoured(
        "ignore_eos",
        bool,
        "Go on after an end-of-sequence token.",
        aliases=(Alias("ignore_eos"),),
    ),
    honoured(
        "skip_special_tokens",
        bool,
        "Leave special tokens out of the text (default true).",
        aliases=(Alias("skip_special_tokens"),),
    ),
    neutral(
        "include_stop_str",
        bool,
        False,
        doc="Keep the stop string in the text.",
        aliases=(Alias("include_stop_str_in_output"),),
    ),
    neutral(
        "presence_penalty",
        float,
        0.0,
        doc="Penalty on tokens that were generated.",
        aliases=(Alias("presence_penalty"),),
    ),
    neutral(
        "frequency_penalty",
        float,
        0.0,
        doc="Penalty by how often tokens were generated.",
        aliases=(Alias("frequency_penalty"),),
    ),
    neutral(
        "logit_bias",
        dict[str, Any],
        {},
        doc="Bias on single tokens.",
        aliases=(Alias("logit_bias"),),
    ),
    refused("json_schema", "Constrained decoding: JSON of this schema."),
    refused("regex", "Constrained decoding: a regular expression."),
    refused("grammar", "Constrained decoding: a grammar."),
    refused("choice", "Constrained decoding: one of these texts."),
    refused("thinking", "Budget of the reasoning part: {budget, end}."),
)

LIBRARY_FIELDS: dict[str, Field] = {item.name: item for item in _LIBRARY_FIELDS}
"""Fields of `transformers.GenerationConfig`."""

GENERATION_FIELDS: dict[str, Field] = {
    **LIBRARY_FIELDS,
    **{item.name: item for item in _OWN_FIELDS},
}
"""All fields by name: the library's, then cbgen's."""

INTERNAL_FIELDS = frozenset({"_from_model_config", "_commit_hash"})
"""Notes that the library leaves in a model's generation_config.json."""


def nearest_field(name: str) -> str | None:
    """Return the field that an unknown name was most likely meant to be, or None."""
    for field in GENERATION_FIELDS.values():
        if any(alias.name == name for alias in field.aliases):
            return field.name
    return nearest_name(name, GENERATION_FIELDS)
