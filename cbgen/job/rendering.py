"""Prompts to token ids: chat templates, special tokens, truncation.

Every prompt becomes a string or token ids first; strings of a group are tokenized together. A
prompt that cannot be rendered fails alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from cbgen.errors import RowError, UsageError
from cbgen.io.prompts import Prompt
from cbgen.recipe.schema import PromptConfig

# A chat template is a program of the model's author; given messages that it did not expect, it
# raises these as well as the template language's own errors.
_TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    KeyError,
    AttributeError,
    IndexError,
    RuntimeError,
)


class Renderer:
    """Turns prompts into token ids.

    Raises:
        UsageError: the recipe asks for a chat template and there is none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, config: PromptConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._chat_template = _read_template(config.chat_template)
        self._sends_chat = self._decide_chat()
        self._special_tokens = tuple(tokenizer.all_special_tokens) if tokenizer else ()

    @property
    def sends_chat(self) -> bool:
        """Whether plain prompts go through the chat template."""
        return self._sends_chat

    def token_ids(self, prompts: Sequence[Prompt]) -> list[list[int] | RowError]:
        """Return the token ids of each prompt, or why it has none."""
        results: list[list[int] | RowError] = []
        texts: dict[bool, list[tuple[int, str]]] = {True: [], False: []}
        for place, prompt in enumerate(prompts):
            results.append([])
            if prompt.token_ids is not None:
                results[place] = prompt.token_ids
                continue
            try:
                text, adds_special_tokens = self._render(prompt)
                texts[adds_special_tokens].append((place, text))
            except RowError as error:
                results[place] = error
        for adds_special_tokens, group in texts.items():
            if group:
                encoded = self._encode([text for _, text in group], adds_special_tokens)
                for (place, _), ids in zip(group, encoded, strict=True):
                    results[place] = ids
        return results

    def truncate(self, token_ids: list[int], limit: int) -> list[int]:
        """Cut a prompt to `limit` tokens as the recipe says.

        Raises:
            RowError: it is longer, and the recipe says that this is an error.
        """
        excess = len(token_ids) - limit
        if excess <= 0:
            return token_ids
        if self._config.truncation == "left":
            return token_ids[excess:]
        if self._config.truncation == "right":
            return token_ids[:limit]
        if self._config.truncation == "middle":
            head = limit - limit // 2
            return token_ids[:head] + token_ids[head + excess :]
        raise RowError(
            "prompt_too_long",
            f"the prompt has {len(token_ids)} tokens, and at most {limit} are allowed; shorten it, "
            "or set prompt.truncation to left, right or middle",
            type="invalid_request",
        )

    def _decide_chat(self) -> bool:
        template = self._chat_template or getattr(self._tokenizer, "chat_template", None)
        if self._config.chat == "auto":
            return template is not None
        if self._config.chat and template is None:
            raise UsageError(
                "prompt.chat is true, and the model has no chat template; give one as "
                "prompt.chat_template, or set prompt.chat: false"
            )
        return self._config.chat

    def _render(self, prompt: Prompt) -> tuple[str, bool]:
        """Return a prompt's text and whether the tokenizer shall add its special tokens."""
        if self._tokenizer is None:
            raise RowError(
                "no_tokenizer",
                "the model has no tokenizer; give the prompt as prompt_token_ids",
                type="invalid_request",
            )
        setting = self._config.add_special_tokens
        messages = prompt.messages
        if messages is None:
            text = prompt.text or ""
            if not text or not self._sends_chat or self._is_rendered(text):
                adds = not self._begins_with_bos(text) if setting == "auto" else setting
                return text, adds
            messages = [{"role": "user", "content": text}]
        return self._render_chat(messages, prompt.tools), setting is True

    def _render_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> str:
        tokenizer = self._tokenizer
        assert tokenizer is not None
        if self._config.system is not None:
            messages = [{"role": "system", "content": self._config.system}, *messages]
        try:
            text: str = tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self._chat_template,
                add_generation_prompt=messages[-1]["role"] != "assistant",
                continue_final_message=messages[-1]["role"] == "assistant",
                tokenize=False,
                **self._config.chat_template_kwargs,
            )
        except _TEMPLATE_ERRORS as error:
            raise RowError(
                "chat_template_failed",
                f"the chat template refused the messages: {str(error) or type(error).__name__}",
                type="invalid_request",
            ) from error
        return text

    def _begins_with_bos(self, text: str) -> bool:
        bos_token: str | None = getattr(self._tokenizer, "bos_token", None)
        return bos_token is not None and text.startswith(bos_token)

    def _is_rendered(self, text: str) -> bool:
        """Whether a plain prompt begins with a special token, as rendered chat does."""
        return self._config.chat == "auto" and text.startswith(self._special_tokens)

    def _encode(
        self, texts: list[str], adds_special_tokens: bool
    ) -> Sequence[list[int] | RowError]:
        assert self._tokenizer is not None
        options = {"add_special_tokens": adds_special_tokens, "verbose": False}
        try:
            encoded: list[list[int]] = self._tokenizer(texts, **options)["input_ids"]
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            if len(texts) == 1:
                return [RowError("tokenization_failed", f"the prompt cannot be tokenized: {error}")]
            return [self._encode([text], adds_special_tokens)[0] for text in texts]
        return encoded


def _read_template(value: str | None) -> str | None:
    """Return a chat template: the value itself, or the text of the file that it names."""
    if value is None or "{" in value or "\n" in value:
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"prompt.chat_template is {value!r}: neither a template nor a readable file ({error})"
        ) from error
