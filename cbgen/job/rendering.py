"""Prompts to texts by chat templates, and on to the tokenizer with or without special tokens.

Every prompt becomes a text or token ids first; the texts of a group are tokenized together. A
prompt that cannot be rendered fails alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from cbgen.errors import RowError, UsageError
from cbgen.io.openai.body_fields import BodyError
from cbgen.io.prompts import Prompt, Rendering
from cbgen.job.tokenization import PromptLimit, PromptTokenizer
from cbgen.recipe.schema import PromptConfig

logger = logging.getLogger(__name__)

# A chat template is a program, of the model's author or of the row: beside the template language's
# own errors it raises whatever the methods of the values in it raise.
_TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    RuntimeError,
    ArithmeticError,
    AssertionError,
    MemoryError,
    OSError,
    StopIteration,
)

_OWN_ARGUMENTS = frozenset({
    "conversation", "messages", "tools", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs", "self",
})  # fmt: skip
"""Arguments of `apply_chat_template`, which are no variables of a template."""

_AS_THE_RECIPE_SAYS = Rendering()


class Renderer:
    """Turns prompts into token ids.

    Attributes:
        tokenizer: of the model; None for a model without one.
        config: the recipe's `prompt` section.
        sends_chat: whether plain prompts go through the chat template.

    Raises:
        UsageError: the recipe asks for a chat template and there is none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, config: PromptConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self._prompt_tokenizer = None if tokenizer is None else PromptTokenizer(tokenizer)
        self._chat_template = _read_template(config.chat_template)
        template = self._chat_template or getattr(tokenizer, "chat_template", None)
        self._template_text = str(template or "")
        self._check_template()
        if config.chat is True and template is None:
            raise UsageError(
                "prompt.chat is true, and the model has no chat template; give one as "
                "prompt.chat_template, or set prompt.chat: false",
                key="prompt.chat",
            )
        self.sends_chat = template is not None if config.chat == "auto" else config.chat
        self._special_tokens = _special_tokens(tokenizer)
        self._warned_of_bos = False

    def prompt_ids(
        self, prompts: Sequence[Prompt], limits: Sequence[PromptLimit]
    ) -> list[list[int] | RowError]:
        """Return the token ids of each prompt, cut to its limit, or why it has none."""
        results: list[list[int] | RowError] = []
        texts: dict[bool, list[tuple[int, str]]] = {True: [], False: []}
        for place, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            results.append([])
            try:
                if prompt.prompt_ids is not None:
                    results[place] = limit.cut(prompt.prompt_ids)
                    continue
                text, adds_special_tokens = self._render(prompt)
                if adds_special_tokens and not self._warned_of_bos and self._has_bos(text):
                    self._warned_of_bos = True
                    logger.warning(
                        "a prompt begins with BOS and gets a second one: add_special_tokens is true"
                    )
                texts[adds_special_tokens].append((place, text))
            except RowError as error:
                results[place] = error
        for adds_special_tokens, group in texts.items():
            if group:
                assert self._prompt_tokenizer is not None, "it rendered the texts"
                encoded = self._prompt_tokenizer.encode(
                    [text for _, text in group],
                    [limits[place] for place, _ in group],
                    add_special_tokens=adds_special_tokens,
                )
                for (place, _), ids in zip(group, encoded, strict=True):
                    results[place] = ids
        return results

    def _check_template(self) -> None:
        """Refuse now what would fail for every row.

        Raises:
            UsageError: the template has a syntax error, or the recipe gives what is no variable.
        """
        taken = _OWN_ARGUMENTS & self.config.chat_template_kwargs.keys()
        if taken:
            names = ", ".join(sorted(taken))
            raise UsageError(
                f"prompt.chat_template_kwargs: {names} is no variable of a template",
                key="prompt.chat_template_kwargs",
            )
        if self.tokenizer is None or self._chat_template is None:
            return
        try:
            self._render_chat([{"role": "user", "content": "a"}], Prompt(messages=[]))
        except RowError as error:
            if isinstance(error.__cause__, TemplateSyntaxError):
                raise UsageError(
                    f"prompt.chat_template, line {error.__cause__.lineno}: {error.__cause__}",
                    key="prompt.chat_template",
                ) from error

    def _render(self, prompt: Prompt) -> tuple[str, bool]:
        """Return a prompt's text and whether the tokenizer shall add its special tokens."""
        if self.tokenizer is None:
            raise RowError(
                "no_tokenizer",
                "the model has no tokenizer; give the prompt as prompt_token_ids",
                type="invalid_request",
            )
        rendering = prompt.rendering or _AS_THE_RECIPE_SAYS
        setting = self.config.add_special_tokens
        if rendering.add_special_tokens is not None:
            setting = rendering.add_special_tokens
        messages = prompt.messages
        if messages is None:
            text = prompt.text or ""
            sends_chat = self.sends_chat and not rendering.is_plain
            # Rendered chat begins with a special token.
            is_rendered = self.config.chat == "auto" and text.startswith(self._special_tokens)
            if not text or not sends_chat or is_rendered:
                adds = not self._has_bos(text) if setting == "auto" else setting
                return text, adds
            messages = [{"role": "user", "content": text}]
        return self._render_chat(messages, prompt), setting is True

    def _render_chat(self, messages: list[dict[str, Any]], prompt: Prompt) -> str:
        tokenizer = self.tokenizer
        assert tokenizer is not None
        if self.config.system is not None:
            messages = [{"role": "system", "content": self.config.system}, *messages]
        rendering = prompt.rendering or _continued(messages)
        try:
            text: str = tokenizer.apply_chat_template(
                [_flat(message) for message in messages],
                tools=prompt.tools,
                chat_template=self._chat_template,
                add_generation_prompt=rendering.add_generation_prompt,
                continue_final_message=rendering.continue_final_message,
                tokenize=False,
                **{**self.config.chat_template_kwargs, **self._variables(rendering)},
            )
        except _TEMPLATE_ERRORS as error:
            raise RowError(
                "chat_template_failed",
                f"the chat template refused the messages: {str(error) or type(error).__name__}",
                type="invalid_request",
            ) from error
        return text

    def _variables(self, rendering: Rendering) -> dict[str, Any]:
        """Return a row's variables of the chat template; those that it does not use are refused."""
        variables: dict[str, Any] = {}
        for field, values in rendering.variables.items():
            if not any(name in self._template_text for name in values):
                raise BodyError(
                    "unsupported_parameter",
                    f"{field} is not known to the chat template; remove it",
                    param=field,
                )
            variables |= values
        taken = _OWN_ARGUMENTS & rendering.chat_template_kwargs.keys()
        if taken:
            raise BodyError(
                "invalid_value",
                f"chat_template_kwargs: {', '.join(sorted(taken))} is no variable of a template",
                param="chat_template_kwargs",
            )
        return {**variables, **rendering.chat_template_kwargs}

    def _has_bos(self, text: str) -> bool:
        bos_token: str | None = getattr(self.tokenizer, "bos_token", None)
        return bos_token is not None and text.startswith(bos_token)


def _continued(messages: list[dict[str, Any]]) -> Rendering:
    """Return how to render a conversation whose row does not say it: a last answer is continued."""
    ends_with_answer = messages[-1]["role"] == "assistant"
    return Rendering(
        add_generation_prompt=not ends_with_answer, continue_final_message=ends_with_answer
    )


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    """Join a message's parts of text: templates of text models expect a string."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _read_template(value: str | None) -> str | None:
    """Return a chat template: the value itself, or the text of the file that it names."""
    if value is None or "{" in value or "\n" in value:
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a name that no file has
        raise UsageError(
            f"prompt.chat_template is {value!r}: neither a template nor a readable file ({error})",
            key="prompt.chat_template",
        ) from error


def _special_tokens(tokenizer: PreTrainedTokenizerBase | None) -> tuple[str, ...]:
    """Return the texts of all special tokens, those without a role of their own too."""
    if tokenizer is None:
        return ()
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    named: list[str] = tokenizer.all_special_tokens
    return tuple({*named, *(token.content for token in added if token.special)})
