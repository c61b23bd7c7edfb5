"""One tiny forward pass that shows whether a model can be served, and what its layers look like.

Configs do not tell the truth about key heads and head sizes under every architecture; the tensors
that arrive at the hook do. A model that ignores the hook, or whose layers carry something from one
packed sequence into the next (recurrent states, convolutions), would answer nonsense, so it is
refused by name. The pass runs one short sequence twice, side by side: both copies must get the same
logits. On the meta device, where there are no logits to compare, the signature must do.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

from cbgen.engine.attention.base import LayerAttention
from cbgen.engine.attention.context import forward_context
from cbgen.engine.cache.groups import AttentionSpan, LayerFacts
from cbgen.engine.cpu.decoder import held_screen_bytes
from cbgen.engine.cpu.linears import packed_bytes
from cbgen.engine.forward import run_model
from cbgen.engine.model.attach import attached
from cbgen.errors import UsageError

_SEQUENCE = (1, 0, 1)
_TOLERANCE = 1e-2
"""Share of the largest logit by which the two copies may differ; rounding makes far less."""
_UNSUPPORTED_LAYERS = ("linear_attention", "conv", "mamba", "recurrent")
_SLIDING_LAYERS = ("sliding_attention", "hybrid_sliding", "reference_sliding_attention")

# What the code of a model raises when it gets no mask, or shapes that it did not expect.
_FORWARD_ERRORS = (TypeError, ValueError, RuntimeError, KeyError, AttributeError, IndexError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is known of a probed model: numbers for the plan and the scheduler."""

    model_type: str
    layers: tuple[LayerFacts, ...]
    """Attention layers, in order."""
    vocab_size: int
    """Rows of the input embedding: token ids are in [0, vocab_size)."""
    logits_size: int
    """Columns of the logits."""
    hidden_size: int
    max_context: int | None
    """Tokens that the positions of the model allow; None = the config sets no bound."""
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int


def end_of_sequence_ids(model: PreTrainedModel, tokenizer: object | None) -> frozenset[int]:
    """Return the ends of sequence that config, generation config and tokenizer name.

    Ids below 0, which some configs have for "none", are left out.
    """
    token_ids: set[int] = set()
    for source in (model.config.get_text_config(), model.generation_config, tokenizer):
        given = getattr(source, "eos_token_id", None)
        if given is not None:
            token_ids.update((given,) if isinstance(given, int) else given)
    return frozenset(token_id for token_id in token_ids if token_id >= 0)


class _Recorder:
    """Answers attention layers with zeros and writes down what they asked."""

    def __init__(self, config: PretrainedConfig, positions: torch.Tensor) -> None:
        self.positions = positions
        self._config = config
        self.layers: dict[int, LayerFacts] = {}
        self.repeated: set[int] = set()

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerAttention,
    ) -> torch.Tensor:
        if layer_index in self.layers:
            self.repeated.add(layer_index)
        self.layers[layer_index] = LayerFacts(
            index=layer_index,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[2],
            value_dim=value.shape[2],
            span=_span(self._config, layer_index, layer.sliding_window),
            has_softcap=layer.softcap is not None,
            has_sinks=layer.sinks is not None,
        )
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


def probe_model(model: PreTrainedModel) -> ModelFacts:
    """Run a short sequence through the model, twice side by side, and return what was seen.

    Raises:
        UsageError: the model ignores the hook, has layers without it, or cannot run packed tokens.
    """
    try:
        return _probe(model)
    except UsageError as error:
        raise UsageError(
            f"model type {model.config.model_type!r} is not supported: {error}"
        ) from error.__cause__


def _probe(model: PreTrainedModel) -> ModelFacts:
    config = model.config.get_text_config()
    for layer_type in getattr(config, "layer_types", None) or ():
        if layer_type in _UNSUPPORTED_LAYERS:
            raise UsageError(f"it has layers of type {layer_type!r}")
    device = model.device
    length = len(_SEQUENCE)
    token_ids = torch.tensor([_SEQUENCE * 2], device=device)
    positions = torch.arange(length, device=device).repeat(2)[None]
    recorder = _Recorder(config, positions[0])
    ends = torch.tensor([length - 1, 2 * length - 1], device=device)
    try:
        with attached(model), forward_context(recorder), torch.inference_mode():
            logits = run_model(model, token_ids, positions, ends).logits().float()
    except _FORWARD_ERRORS as error:
        raise UsageError(
            f"it cannot run packed tokens without a mask ({type(error).__name__}: {error})"
        ) from error
    expected = set(range(config.num_hidden_layers))
    if recorder.layers.keys() != expected:
        missing = sorted(expected - recorder.layers.keys())
        raise UsageError(
            "its attention does not go through transformers' attention interface in layers "
            f"{_ranges(missing)} of {len(expected)}"
        )
    if recorder.repeated:
        raise UsageError(
            f"it attends more than once in layers {_ranges(sorted(recorder.repeated))}, and the "
            "cache keeps one set of keys a layer"
        )
    if not _keeps_sequences_apart(model, logits):
        raise UsageError(
            "its layers carry a state from one sequence to the next, which is not kept apart here"
        )
    return ModelFacts(
        model_type=str(model.config.model_type),
        layers=tuple(recorder.layers[index] for index in sorted(recorder.layers)),
        vocab_size=model.get_input_embeddings().weight.shape[0],
        logits_size=logits.shape[-1],
        hidden_size=config.hidden_size,
        max_context=_max_context(config),
        dtype=model.dtype,
        device=device,
        weight_bytes=_weight_bytes(model),
    )


def _span(config: PretrainedConfig, layer_index: int, told: int | None) -> AttentionSpan:
    """Return which keys the queries of a layer see.

    What the layer tells the hook counts. Some tell nothing and leave it to the mask (Llama 4,
    Qwen2-MoE, Phi-MoE), which follows the config by the rule that transformers' own cache follows
    too: layer by layer by `layer_types`; without that, every layer is of one kind.

    Raises:
        UsageError: the config says that there is a window, and not which.
    """
    if told:
        return AttentionSpan(window=told)
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return AttentionSpan(window=window or None, chunk=None if window else chunk or None)
    layer_type = layer_types[layer_index]
    is_chunked = layer_type == "chunked_attention"
    if not is_chunked and layer_type not in _SLIDING_LAYERS:
        return AttentionSpan()
    size = chunk if is_chunked else window
    if not size:
        raise UsageError(
            f"layer {layer_index} is of type {layer_type!r}, and its config has no "
            f"{'attention_chunk_size' if is_chunked else 'sliding_window'}"
        )
    return AttentionSpan(chunk=size) if is_chunked else AttentionSpan(window=size)


def _keeps_sequences_apart(model: PreTrainedModel, logits: torch.Tensor) -> bool:
    if getattr(model, "_is_stateful", False):  # transformers' own mark of recurrent states
        return False
    if logits.is_meta:
        return "position_ids" in inspect.signature(model.forward).parameters
    first, second = logits
    return not (first - second).abs().max() > _TOLERANCE * first.abs().max()


def _max_context(config: PretrainedConfig) -> int | None:
    bound: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Beyond its original length, the longest row of a step would turn the positions of all.
        bound = rope.get("original_max_position_embeddings", bound)
    return bound


def _weight_bytes(model: PreTrainedModel) -> int:
    # `parameters` gives tied weights once.
    unpacked = sum(p.numel() * p.element_size() for p in model.parameters())
    return int(unpacked) + packed_bytes(model) + held_screen_bytes(model)


def _ranges(numbers: list[int]) -> str:
    if len(numbers) > 6:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))
