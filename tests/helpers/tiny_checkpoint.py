"""A model folder that loads in an instant: two random Llama layers and a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

CONTEXT = 256
"""Tokens that prompt and answer may have together."""
NUM_BYTES = 256
"""A token for every byte, after those of the special tokens."""
SPECIAL_TOKENS = ("<s>", "</s>", "<|user|>", "<|assistant|>")
VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant'] -%}
{{ raise_exception('unknown role ' + message.role) }}
{%- endif -%}
<|user|>{{ message.content }}</s>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


def save_tiny_checkpoint(folder: Path) -> Path:
    """Write weights, tokenizer and configs into `folder` and return it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,  # so that answers vary
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    _make_tokenizer().save_pretrained(folder)
    return folder


def _make_tokenizer():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
