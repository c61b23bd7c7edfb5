"""The hook: makes a transformers model send its attention to the running step, and undoes it.

Registers the name `cbgen` with transformers' attention and mask interfaces. The mask function
answers None: which tokens see each other is the paged cache's matter, not a mask's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from cbgen.engine.attention.base import LayerAttention
from cbgen.engine.attention.context import current_context

HOOK_NAME = "cbgen"


@dataclass(slots=True)
class _Attachment:
    """A config whose attention is routed through the hook, by one engine or several."""

    config: PretrainedConfig
    implementation: str
    """What stood there before the first of them came."""
    num_users: int = 0


_lock = threading.Lock()
_attachments: dict[int, _Attachment] = {}


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
        attention_mask: ignored.
        options: `scaling`, `sliding_window`, `softcap` and `s_aux` (sinks) are read.

    Returns:
        The output [1, T, num_heads, value_dim], and None in place of attention weights.
    """
    scaling = options.get("scaling")
    layer = LayerAttention(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=options.get("sliding_window"),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    output = current_context().attend(
        module.layer_idx,  # type: ignore[arg-type]  # every hooked layer has it, the probe says
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        layer,
    )
    return output[None], None


def register_hook() -> None:
    """Make the name known to transformers; doing it again changes nothing."""
    AttentionInterface.register(HOOK_NAME, attention_hook)
    AttentionMaskInterface.register(HOOK_NAME, _no_mask)


def _no_mask(*_args: object, **_options: object) -> None:
    return None


@contextmanager
def attached(model: PreTrainedModel) -> Iterator[None]:
    """Route the model's attention through the hook; on exit the model is as it was."""
    register_hook()
    configs = _configs(model)
    with _lock:
        for config in configs:
            attachment = _Attachment(config, config._attn_implementation)
            _attachments.setdefault(id(config), attachment).num_users += 1
        for config in configs:
            config._attn_implementation = HOOK_NAME
    try:
        yield
    finally:
        with _lock:
            for config in configs:
                _release(config)


def _release(config: PretrainedConfig) -> None:
    attachment = _attachments[id(config)]
    attachment.num_users -= 1
    if attachment.num_users == 0:
        del _attachments[id(config)]
        config._attn_implementation = attachment.implementation


def _configs(model: PreTrainedModel) -> list[Any]:
    """Return every distinct config object that a module of the model reads."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            found.setdefault(id(config), config)
    return list(found.values())
