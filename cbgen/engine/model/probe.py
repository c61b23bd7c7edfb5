"""One tiny forward pass that shows whether a model obeys the hook, and what its layers look like.

Configs do not tell the truth about key heads and head sizes under every architecture; the tensors
that arrive at the hook do. A model that ignores the hook would answer nonsense, so it is refused by
name.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel

from cbgen.engine.attention.base import LayerAttention
from cbgen.engine.attention.context import forward_context
from cbgen.engine.cache.groups import LayerFacts
from cbgen.engine.model.attach import attached
from cbgen.engine.model.facts import ModelFacts
from cbgen.errors import UsageError

_PROBE_TOKENS = 2
_UNSUPPORTED_LAYERS = ("chunked_attention", "linear_attention", "conv", "mamba", "recurrent")


class _Recorder:
    """Answers attention layers with zeros and writes down what they asked."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerFacts] = {}

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerAttention,
    ) -> torch.Tensor:
        self.layers[layer_index] = LayerFacts(
            index=layer_index,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[2],
            value_dim=value.shape[2],
            sliding_window=layer.sliding_window,
            has_softcap=layer.softcap is not None,
            has_sinks=layer.sinks is not None,
        )
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


def probe_model(model: PreTrainedModel) -> ModelFacts:
    """Run two tokens through the model and return what was seen.

    Raises:
        UsageError: the model ignores the hook, has layers without it, or cannot run packed tokens.
    """
    config = model.config.get_text_config()
    model_type = str(model.config.model_type)
    _refuse_layer_types(config, model_type)
    recorder = _Recorder()
    device = model.device
    token_ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device=device)
    with attached(model), forward_context(recorder), torch.inference_mode():
        logits = run_model(
            model,
            token_ids,
            torch.arange(_PROBE_TOKENS, device=device)[None],
            torch.tensor([_PROBE_TOKENS - 1], device=device),
        )
    expected = set(range(config.num_hidden_layers))
    if recorder.layers.keys() != expected:
        missing = sorted(expected - recorder.layers.keys())
        raise UsageError(
            f"model type {model_type!r} is not supported: its attention does not go through "
            f"transformers' attention interface in layers {_ranges(missing)} of {len(expected)}"
        )
    return ModelFacts(
        model_type=model_type,
        layers=tuple(recorder.layers[index] for index in sorted(recorder.layers)),
        vocab_size=model.get_input_embeddings().weight.shape[0],
        logits_size=logits.shape[-1],
        hidden_size=config.hidden_size,
        max_context=getattr(config, "max_position_embeddings", None),
        dtype=logits.dtype,
        device=device,
        weight_bytes=_weight_bytes(model),
    )


def run_model(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    position_ids: torch.Tensor,
    logit_indices: torch.Tensor,
) -> torch.Tensor:
    """Run one packed forward pass.

    The mask of ones keeps transformers from looking for packed sequences in the positions, which
    costs a device synchronization; the mask function of the hook then drops it.

    Args:
        model: the attached model.
        token_ids: [1, T] int64.
        position_ids: [1, T] int64.
        logit_indices: [n] int64, the tokens whose logits are wanted.

    Returns:
        [n, vocab] logits in the model's dtype.
    """
    output = model(
        input_ids=token_ids,
        position_ids=position_ids,
        attention_mask=torch.ones_like(token_ids),
        use_cache=False,
        logits_to_keep=logit_indices,
    )
    logits: torch.Tensor = output.logits[0]
    return logits


def _refuse_layer_types(config: PretrainedConfig, model_type: str) -> None:
    for layer_type in getattr(config, "layer_types", None) or ():
        if layer_type in _UNSUPPORTED_LAYERS:
            raise UsageError(
                f"model type {model_type!r} is not supported: it has layers of type {layer_type!r}"
            )


def _weight_bytes(model: PreTrainedModel) -> int:
    # Tied weights are one tensor under two names.
    storages = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    return sum(storages.values())


def _ranges(numbers: list[int]) -> str:
    if len(numbers) > 6:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))
