"""The hook: makes a transformers model send its attention to the running step, and undoes it.

Meanwhile the model is in evaluation mode.

Registers the name `cbgen` with transformers' attention and mask interfaces. The mask function
answers None: which tokens see each other is the paged cache's matter, not a mask's.

One thing beside attention is taken out of the model's hands. Llama 4 scales the queries of its
layers without rotary positions by their place in the forward pass, where packed tokens of many
requests stand side by side; the hook scales them by their positions instead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from cbgen.engine.attention.base import LayerAttention
from cbgen.engine.attention.context import current_context

HOOK_NAME = "cbgen"

_TEMPERATURE = "attn_temperature_tuning"
"""Attribute of Llama 4's layers, and of their config: whether queries are scaled by position."""


@dataclass(slots=True)
class _Attachment:
    """An attribute that is changed while one engine or several use the model."""

    owner: Any
    """Is kept alive, since its id stands for it."""
    value: Any
    """What stood there before the first of them came."""
    num_users: int = 0


_lock = threading.Lock()
_attachments: dict[tuple[int, str], _Attachment] = {}


def attention_hook(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,  # noqa: ANN401  whatever transformers passes
) -> tuple[torch.Tensor, None]:
    """Answer one attention layer; the signature is the one that transformers calls.

    Args:
        module: the attention layer, which has `layer_idx`.
        query: [1, num_heads, T, key_dim].
        key: [1, num_kv_heads, T, key_dim].
        value: [1, num_kv_heads, T, value_dim].
        attention_mask: must be None, as the hook's mask function answered.
        options: `scaling`, `sliding_window`, `softcap` and `s_aux` (sinks) are read.

    Returns:
        The output [1, T, num_heads, value_dim], and None in place of attention weights.

    Raises:
        ValueError: the layer would have tokens see others than those before them.
    """
    if attention_mask is not None:
        raise ValueError("an attention layer brings a mask of its own")
    if not getattr(module, "is_causal", True):
        raise ValueError("an attention layer lets tokens see later ones")
    context = current_context()
    if getattr(module, _TEMPERATURE, None) is not None:
        query = _tempered(module, query, context.positions)
    scaling = options.get("scaling")
    layer = LayerAttention(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=options.get("sliding_window"),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    output = context.attend(
        module.layer_idx,  # type: ignore[arg-type]  # every hooked layer has it, the probe says
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        layer,
    )
    return output[None], None


def _no_mask(*_args: object, **_options: object) -> None:
    return None


def _tempered(module: Any, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """Return the query scaled by position, as `Llama4TextAttention` does in a pass of one sequence.

    Args:
        module: the attention layer.
        query: [1, num_heads, T, key_dim].
        positions: [T] int64.
    """
    if module.use_rope or not getattr(module.config, _TEMPERATURE):
        return query
    steps = torch.floor((positions.float() + 1.0) / module.floor_scale)
    scales = torch.log1p(steps) * module.attn_scale + 1.0
    tempered: torch.Tensor = (query * scales[:, None]).to(query.dtype)
    return tempered


@contextmanager
def attached(model: PreTrainedModel) -> Iterator[None]:
    """Route the model's attention through the hook, in evaluation mode; then it is as it was.

    Of several such blocks on one model the last to end undoes it.
    """
    # Again and again, which changes nothing.
    AttentionInterface.register(HOOK_NAME, attention_hook)
    AttentionMaskInterface.register(HOOK_NAME, _no_mask)
    changes: list[tuple[Any, str, object]]
    changes = [(config, "_attn_implementation", HOOK_NAME) for config in _configs(model)]
    changes += [
        (module, _TEMPERATURE, False)
        for module in model.modules()
        if getattr(module, _TEMPERATURE, None) is not None
    ]
    with _lock:
        changes += [
            (module, "training", False)
            for module in model.modules()
            if module.training or (id(module), "training") in _attachments
        ]
        for owner, name, _ in changes:
            attachment = _Attachment(owner, getattr(owner, name))
            _attachments.setdefault((id(owner), name), attachment).num_users += 1
        # After the last one was read: a config hands what is set on to the configs inside it.
        for owner, name, value in changes:
            setattr(owner, name, value)
    try:
        yield
    finally:
        with _lock:
            for owner, name, _ in changes:
                attachment = _attachments[id(owner), name]
                attachment.num_users -= 1
                if attachment.num_users == 0:
                    del _attachments[id(owner), name]
                    setattr(owner, name, attachment.value)


def _configs(model: PreTrainedModel) -> list[Any]:
    """Return every distinct config object that a module of the model reads."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            found.setdefault(id(config), config)
    return list(found.values())
