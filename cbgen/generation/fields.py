"""The table of settings: what one request may say, in every dialect, and what becomes of it.

A row of the table holds for recipes, for rows, for a model's generation_config.json, for keyword
arguments in Python and, through its aliases, for request bodies of OpenAI's API and of vLLM. Names
and meanings are those of `transformers.GenerationConfig`; the fields of cbgen come last. A test
compares the table with the installed library.
"""

from __future__ import annotations

import operator
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial, reduce
from typing import Any, Literal

from cbgen.engine.sampling.params import MAX_SEED, RANGES
from cbgen.values import ANY_NUMBER, Annotation, Plain, Range, members, nearest_name

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
    """The name of a field in request bodies, where a body differs in more than the name."""

    name: str
    endpoints: tuple[Endpoint, ...] = ("chat", "completions")
    range: Range | None = None
    convert: Callable[[Any], Plain] | None = None
    """From the body's value to the field's."""
    most_items: int | None = None
    """Length of a list in OpenAI's API; vLLM has no bound."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field, its values and its support; null is accepted for every one and means unset."""

    support: Support
    name: str
    doc: str = ""
    type: Annotation = Any
    range: Range = ANY_NUMBER
    neutral: tuple[Plain, ...] = ()
    """Values that ask for nothing."""
    body: str | tuple[Alias, ...] = ()
    """Its names in bodies of OpenAI's API and of vLLM; of two in one body the later counts."""

    @property
    def aliases(self) -> tuple[Alias, ...]:
        """The names of the field in request bodies."""
        return (Alias(self.body),) if isinstance(self.body, str) else self.body

    @property
    def takes_list(self) -> bool:
        """Whether the field may hold several values."""
        return any(typing.get_origin(member) is list for member in members(self.type))


honoured = partial(Field, Support.HONOURED)
no_effect = partial(Field, Support.NO_EFFECT)
refused = partial(Field, Support.REFUSED)


def neutral(name: str, *values: Plain, doc: str = "", body: str | tuple[Alias, ...] = ()) -> Field:
    """Return a field that is accepted with one of these values alone; its type is theirs."""
    of_any: dict[type, Any] = {list: list[Any], dict: dict[str, Any]}
    kinds = (of_any.get(type(value), type(value)) for value in values)
    kind = reduce(operator.or_, kinds)
    return Field(Support.NEUTRAL, name, doc, kind, neutral=values, body=body)


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
        "Most tokens to generate; unset: what the context has.",
        int,
        range=RANGES["max_new_tokens"],
        body=(Alias("max_tokens"), Alias("max_completion_tokens", endpoints=("chat",))),
    ),
    honoured(
        "max_length",
        "Most tokens of prompt and answer; max_new_tokens wins.",
        int,
        range=Range(at_least=1),
    ),
    neutral("min_length", 0, doc="Fewest tokens of prompt and answer."),
    neutral("min_new_tokens", 0, doc="Fewest tokens to generate.", body="min_tokens"),
    neutral("early_stopping", False, doc="End of a beam search."),
    refused("max_time", "Seconds that one answer may take."),
    honoured(
        "stop_strings",
        "Texts that end the answer, which is cut before the first of them.",
        str | list[str],
        body=(Alias("stop", most_items=4),),
    ),
    # Strategy
    honoured(
        "do_sample",
        "Sample, or take the best token; unset = sample if a temperature is given.",
        bool,
    ),
    neutral("num_beams", 1, doc="Beam search."),
    neutral("use_mtp", False, doc="Multi-token prediction."),
    # Cache
    neutral("use_cache", True, doc="Reuse keys and values."),
    neutral("cache_implementation", *_SAME_TOKENS_CACHES, doc="Class of the cache."),
    neutral("cache_config", {}, doc="Settings of the cache class."),
    no_effect("max_cache_len", "Length of a static cache.", int),
    # Logits
    honoured(
        "temperature",
        "Divisor of the logits; 0 = greedy.",
        float,
        range=RANGES["temperature"],
        body="temperature",
    ),
    honoured(
        "top_k",
        "Keep the k best tokens; 0 = off.",
        int,
        range=RANGES["top_k"],
        body=(Alias("top_k", range=Range(at_least=-1), convert=lambda k: 0 if k == -1 else k),),
    ),
    honoured(
        "top_p",
        "Keep the best tokens up to this probability; 1.0 = off.",
        float,
        range=RANGES["top_p"],
        body=(
            Alias(
                "top_p",
                range=Range(at_least=0, at_most=1),
                convert=lambda p: p or _BEST_TOKEN_ALONE,
            ),
        ),
    ),
    honoured(
        "min_p",
        "Keep tokens at least this many times as probable as the best; 0.0 = off.",
        float,
        range=RANGES["min_p"],
        body="min_p",
    ),
    refused("top_h", "Sampling bounded by entropy."),
    neutral("typical_p", 1.0, doc="Locally typical sampling."),
    neutral("epsilon_cutoff", 0.0, doc="Epsilon sampling."),
    neutral("eta_cutoff", 0.0, doc="Eta sampling."),
    honoured(
        "repetition_penalty",
        "Above 1: tokens of prompt and answer become less probable; 1.0 = off.",
        float,
        range=RANGES["repetition_penalty"],
        body="repetition_penalty",
    ),
    neutral("encoder_repetition_penalty", 1.0, doc="Penalty on tokens outside of the prompt."),
    neutral("length_penalty", 1.0, doc="Length penalty of a beam search.", body="length_penalty"),
    neutral("no_repeat_ngram_size", 0, doc="Length of token runs that may come once only."),
    neutral("bad_words_ids", [], doc="Token runs that are not allowed."),
    neutral("renormalize_logits", False, doc="Normalize the logits after processing."),
    refused("forced_bos_token_id", "First token of every answer."),
    refused("forced_eos_token_id", "Last token of an answer that reaches max_length."),
    neutral("remove_invalid_values", False, doc="Replace NaN and infinity in the logits."),
    refused("exponential_decay_length_penalty", "Growing push towards the end."),
    neutral("suppress_tokens", [], doc="Tokens that are not allowed."),
    neutral("begin_suppress_tokens", [], doc="Tokens that are not allowed at the start."),
    neutral("sequence_bias", [], {}, doc="Bias on token runs."),
    neutral("token_healing", False, doc="Replace the tail of the prompt."),
    neutral("guidance_scale", 1.0, doc="Classifier-free guidance."),
    refused("watermarking_config", "Watermark in the answer."),
    # Output of generate()
    honoured(
        "num_return_sequences",
        "Samples of each row; above 1 the row must sample and its answers are in `choices`.",
        int,
        range=Range(at_least=1, at_most=128),
        body="n",
    ),
    neutral("output_attentions", False, doc="Return attention weights."),
    neutral("output_hidden_states", False, doc="Return hidden states."),
    neutral("output_scores", False, doc="Return processed logits."),
    neutral("output_logits", False, doc="Return logits."),
    neutral("return_dict_in_generate", False, doc="Python type that generate() returns."),
    # Special tokens
    no_effect("pad_token_id", "Padding token; nothing is padded.", TokenIds),
    no_effect("bos_token_id", "First token of a prompt; the tokenizer decides.", TokenIds),
    honoured(
        "eos_token_id",
        "Tokens that end an answer, in place of the model's own.",
        TokenIds,
        range=Range(at_least=0),
    ),
    # Encoder-decoder models
    neutral(
        "encoder_no_repeat_ngram_size", 0, doc="Length of prompt runs that may not come again."
    ),
    no_effect("decoder_start_token_id", "First token of a decoder beside an encoder.", TokenIds),
    # Assisted generation
    neutral("is_assistant", False, doc="Be the assistant of another model."),
    neutral("num_assistant_tokens", 20, 5, doc="Tokens that an assistant drafts."),
    neutral("num_assistant_tokens_schedule", "constant", doc="Change of num_assistant_tokens."),
    neutral("assistant_confidence_threshold", 0.4, doc="Confidence that a draft needs."),
    refused("prompt_lookup_num_tokens", "Tokens drafted from the prompt."),
    refused("max_matching_ngram_size", "Longest run looked up in the prompt."),
    refused("assistant_early_exit", "Layer that drafts."),
    neutral("assistant_lookbehind", 10, doc="Tokens matched between tokenizers."),
    neutral("target_lookbehind", 10, doc="Tokens matched between tokenizers."),
    refused("assistant_ensemble_weight", "Weight of the assistant's distribution."),
    refused("speculation_type", "Kind of speculative decoding."),
    # Performance
    refused("compile_config", "torch.compile settings."),
    neutral("disable_compile", True, False, doc="Keep torch.compile off."),
    refused("continuous_batching_config", "Give it as a section of its own."),
    # Kept by the library for old files
    neutral("low_memory", False, doc="Contrastive search in steps."),
    neutral("penalty_alpha", 0.0, doc="Contrastive search."),
    refused("dola_layers", "Decoding by contrasting layers."),
    neutral("diversity_penalty", 0.0, doc="Group beam search."),
    neutral("num_beam_groups", 1, doc="Group beam search."),
    neutral("constraints", [], doc="Constrained beam search."),
    neutral("force_words_ids", [], doc="Words that must come."),
    refused("prefill_chunk_size", "See max_batch_tokens in continuous_batching_config."),
    no_effect("transformers_version", "Version that wrote the file.", str),
)

_OWN_FIELDS = (
    honoured(
        "seed",
        "Seed of the run; a row's own stands in place of (run seed, id).",
        int,
        range=RANGES["seed"],
        body=(
            Alias(
                "seed",
                range=Range(at_least=-MAX_SEED - 1, at_most=MAX_SEED),
                convert=lambda seed: seed % (MAX_SEED + 1),
            ),
        ),
    ),
    honoured(
        "stop_token_ids",
        "Tokens that end an answer, beside eos_token_id.",
        Tokens,
        range=Range(at_least=0),
        body="stop_token_ids",
    ),
    honoured("ignore_eos", "Go on after an end-of-sequence token.", bool, body="ignore_eos"),
    honoured(
        "skip_special_tokens",
        "Leave special tokens out of the text (default true).",
        bool,
        body="skip_special_tokens",
    ),
    neutral(
        "include_stop_str",
        False,
        doc="Keep the stop string in the text.",
        body="include_stop_str_in_output",
    ),
    neutral(
        "presence_penalty",
        0.0,
        doc="Penalty on tokens that were generated.",
        body="presence_penalty",
    ),
    neutral(
        "frequency_penalty",
        0.0,
        doc="Penalty by how often tokens were generated.",
        body="frequency_penalty",
    ),
    neutral("logit_bias", {}, doc="Bias on single tokens.", body="logit_bias"),
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
