"""Every field of a generation config: its type and range, and whether this version honours it.

The names and meanings are those of `transformers.GenerationConfig`; the fields of cbgen come last.
A test compares the table with the installed library.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from cbgen.values import Annotation, Plain


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationField:
    """One field of a generation config; null is accepted for every one and means unset."""

    name: str
    type: Annotation
    support: Support
    doc: str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    neutral: tuple[Plain, ...] = ()
    """Values that ask for nothing."""


GENERATION_SECTION = "generation_config"
"""Name of the fields' section in a recipe and of their object in a row."""

MAX_SEED = 2**63 - 1
MAX_RETURN_SEQUENCES = 128
"""Samples of one row, as OpenAI bounds them."""


def _honoured(
    name: str,
    kind: Annotation,
    doc: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> GenerationField:
    return GenerationField(
        name=name,
        type=kind,
        support=Support.HONOURED,
        doc=doc,
        at_least=at_least,
        above=above,
        at_most=at_most,
    )


def _no_effect(name: str, kind: Annotation, doc: str) -> GenerationField:
    return GenerationField(name=name, type=kind, support=Support.NO_EFFECT, doc=doc)


def _neutral(name: str, kind: Annotation, *values: Plain, doc: str) -> GenerationField:
    return GenerationField(name=name, type=kind, support=Support.NEUTRAL, doc=doc, neutral=values)


def _refused(name: str, doc: str) -> GenerationField:
    return GenerationField(name=name, type=Any, support=Support.REFUSED, doc=doc)


TokenIds = int | list[int]
Tokens = list[int]
_SAME_TOKENS_CACHES = ("dynamic", "static", "hybrid", "sliding_window", "paged")
"""Caches of the library that hold every key and value as it is."""

_LIBRARY_FIELDS = (
    # Length of the answer
    _honoured(
        "max_new_tokens",
        int,
        "Most tokens to generate; unset: what the context has.",
        at_least=1,
    ),
    _honoured(
        "max_length", int, "Most tokens of prompt and answer; max_new_tokens wins.", at_least=1
    ),
    _neutral("min_length", int, 0, doc="Fewest tokens of prompt and answer."),
    _neutral("min_new_tokens", int, 0, doc="Fewest tokens to generate."),
    _neutral("early_stopping", bool | Literal["never"], False, doc="End of a beam search."),
    _refused("max_time", "Seconds that one answer may take."),
    _neutral("stop_strings", str | list[str], [], doc="Text that ends the answer."),
    # Strategy
    _honoured(
        "do_sample",
        bool,
        "Sample, or take the best token; unset = sample if a temperature is given.",
    ),
    _neutral("num_beams", int, 1, doc="Beam search."),
    _neutral("use_mtp", bool, False, doc="Multi-token prediction."),
    # Cache
    _neutral("use_cache", bool, True, doc="Reuse keys and values."),
    _neutral("cache_implementation", str, *_SAME_TOKENS_CACHES, doc="Class of the cache."),
    _neutral("cache_config", dict[str, Any], {}, doc="Settings of the cache class."),
    _no_effect("max_cache_len", int, "Length of a static cache."),
    # Logits
    _honoured(
        "temperature", float, "Divisor of the logits; 0 = greedy.", at_least=0, at_most=1_000_000
    ),
    _honoured("top_k", int, "Keep the k best tokens; 0 = off.", at_least=0),
    _honoured(
        "top_p",
        float,
        "Keep the best tokens up to this probability; 1.0 = off.",
        above=0,
        at_most=1,
    ),
    _honoured(
        "min_p",
        float,
        "Keep tokens at least this many times as probable as the best; 0.0 = off.",
        at_least=0,
        at_most=1,
    ),
    _refused("top_h", "Sampling bounded by entropy."),
    _neutral("typical_p", float, 1.0, doc="Locally typical sampling."),
    _neutral("epsilon_cutoff", float, 0.0, doc="Epsilon sampling."),
    _neutral("eta_cutoff", float, 0.0, doc="Eta sampling."),
    _neutral("repetition_penalty", float, 1.0, doc="Penalty on tokens that came before."),
    _neutral(
        "encoder_repetition_penalty", float, 1.0, doc="Penalty on tokens outside of the prompt."
    ),
    _neutral("length_penalty", float, 1.0, doc="Length penalty of a beam search."),
    _neutral("no_repeat_ngram_size", int, 0, doc="Length of token runs that may come once only."),
    _neutral("bad_words_ids", list[list[int]], [], doc="Token runs that are not allowed."),
    _neutral("renormalize_logits", bool, False, doc="Normalize the logits after processing."),
    _refused("forced_bos_token_id", "First token of every answer."),
    _refused("forced_eos_token_id", "Last token of an answer that reaches max_length."),
    _neutral("remove_invalid_values", bool, False, doc="Replace NaN and infinity in the logits."),
    _refused("exponential_decay_length_penalty", "Growing push towards the end."),
    _neutral("suppress_tokens", Tokens, [], doc="Tokens that are not allowed."),
    _neutral("begin_suppress_tokens", Tokens, [], doc="Tokens that are not allowed at the start."),
    _neutral("sequence_bias", list[Any] | dict[str, Any], [], {}, doc="Bias on token runs."),
    _neutral("token_healing", bool, False, doc="Replace the tail of the prompt."),
    _neutral("guidance_scale", float, 1.0, doc="Classifier-free guidance."),
    _refused("watermarking_config", "Watermark in the answer."),
    # Output of generate()
    _honoured(
        "num_return_sequences",
        int,
        "Samples of each row; above 1 the row must sample and its answers are in `choices`.",
        at_least=1,
        at_most=MAX_RETURN_SEQUENCES,
    ),
    _neutral("output_attentions", bool, False, doc="Return attention weights."),
    _neutral("output_hidden_states", bool, False, doc="Return hidden states."),
    _neutral("output_scores", bool, False, doc="Return processed logits."),
    _neutral("output_logits", bool, False, doc="Return logits."),
    _neutral("return_dict_in_generate", bool, False, doc="Python type that generate() returns."),
    # Special tokens
    _no_effect("pad_token_id", TokenIds, "Padding token; nothing is padded."),
    _no_effect("bos_token_id", TokenIds, "First token of a prompt; the tokenizer decides."),
    _honoured(
        "eos_token_id",
        TokenIds,
        "Tokens that end an answer, in place of the model's own.",
        at_least=0,
    ),
    # Encoder-decoder models
    _neutral(
        "encoder_no_repeat_ngram_size", int, 0, doc="Length of prompt runs that may not come again."
    ),
    _no_effect("decoder_start_token_id", TokenIds, "First token of a decoder beside an encoder."),
    # Assisted generation
    _neutral("is_assistant", bool, False, doc="Be the assistant of another model."),
    _neutral("num_assistant_tokens", int, 20, 5, doc="Tokens that an assistant drafts."),
    _neutral(
        "num_assistant_tokens_schedule", str, "constant", doc="Change of num_assistant_tokens."
    ),
    _neutral("assistant_confidence_threshold", float, 0.4, doc="Confidence that a draft needs."),
    _refused("prompt_lookup_num_tokens", "Tokens drafted from the prompt."),
    _refused("max_matching_ngram_size", "Longest run looked up in the prompt."),
    _refused("assistant_early_exit", "Layer that drafts."),
    _neutral("assistant_lookbehind", int, 10, doc="Tokens matched between tokenizers."),
    _neutral("target_lookbehind", int, 10, doc="Tokens matched between tokenizers."),
    _refused("assistant_ensemble_weight", "Weight of the assistant's distribution."),
    _refused("speculation_type", "Kind of speculative decoding."),
    # Performance
    _refused("compile_config", "torch.compile settings."),
    _neutral("disable_compile", bool, True, False, doc="Keep torch.compile off."),
    _refused("continuous_batching_config", "Give it as a section of its own."),
    # Kept by the library for old files
    _neutral("low_memory", bool, False, doc="Contrastive search in steps."),
    _neutral("penalty_alpha", float, 0.0, doc="Contrastive search."),
    _refused("dola_layers", "Decoding by contrasting layers."),
    _neutral("diversity_penalty", float, 0.0, doc="Group beam search."),
    _neutral("num_beam_groups", int, 1, doc="Group beam search."),
    _neutral("constraints", list[Any], [], doc="Constrained beam search."),
    _neutral("force_words_ids", list[Any], [], doc="Words that must come."),
    _refused("prefill_chunk_size", "See max_batch_tokens in continuous_batching_config."),
    _no_effect("transformers_version", str, "Version that wrote the file."),
)

_OWN_FIELDS = (
    _honoured(
        "seed",
        int,
        "Seed of the run; a row's own stands in place of (run seed, id).",
        at_least=0,
        at_most=MAX_SEED,
    ),
    _honoured(
        "stop_token_ids", Tokens, "Tokens that end an answer, beside eos_token_id.", at_least=0
    ),
    _honoured("ignore_eos", bool, "Go on after an end-of-sequence token."),
    _honoured("skip_special_tokens", bool, "Leave special tokens out of the text (default true)."),
    _neutral("include_stop_str", bool, False, doc="Keep the stop string in the text."),
    _neutral("presence_penalty", float, 0.0, doc="Penalty on tokens that were generated."),
    _neutral("frequency_penalty", float, 0.0, doc="Penalty by how often tokens were generated."),
    _neutral("logit_bias", dict[str, Any], {}, doc="Bias on single tokens."),
    _refused("json_schema", "Constrained decoding: JSON of this schema."),
    _refused("regex", "Constrained decoding: a regular expression."),
    _refused("grammar", "Constrained decoding: a grammar."),
    _refused("choice", "Constrained decoding: one of these texts."),
    _refused("thinking", "Budget of the reasoning part: {budget, end}."),
)

LIBRARY_FIELDS: dict[str, GenerationField] = {item.name: item for item in _LIBRARY_FIELDS}
"""Fields of `transformers.GenerationConfig`."""

GENERATION_FIELDS: dict[str, GenerationField] = {
    **LIBRARY_FIELDS,
    **{item.name: item for item in _OWN_FIELDS},
}
"""All fields by name: the library's, then cbgen's."""

INTERNAL_FIELDS = frozenset({"_from_model_config", "_commit_hash"})
"""Notes that the library leaves in a model's generation_config.json."""
