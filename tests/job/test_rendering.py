from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from cbgen.errors import RowError, UsageError
from cbgen.io.prompts import Prompt, Rendering
from cbgen.job.rendering import Renderer
from cbgen.job.tokenization import PromptLimit
from cbgen.recipe.schema import PromptConfig

USER, ASSISTANT = "<|user|>", "<|assistant|>"


@pytest.fixture
def tokenizer(checkpoint):
    """A tokenizer that puts BOS before a text, as Llama's does."""
    loaded = AutoTokenizer.from_pretrained(checkpoint)
    loaded.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", loaded.bos_token_id)]
    )
    return loaded


def prompt_ids(renderer, prompts):
    """Return the token ids of prompts that may have any length."""
    return renderer.prompt_ids(prompts, [PromptLimit(2**20, "error")] * len(prompts))


def text_of(tokenizer, prompt, **config):
    (ids,) = prompt_ids(Renderer(tokenizer, PromptConfig(**config)), [prompt])
    if isinstance(ids, RowError):
        raise ids
    return tokenizer.decode(ids, skip_special_tokens=False)


def plain(text):
    return Prompt(text=text)


def chat(*messages, tools=None):
    return Prompt(
        messages=[{"role": role, "content": content} for role, content in messages],
        tools=tools,
    )


def test_a_plain_prompt_goes_through_the_chat_template_where_there_is_one(tokenizer):
    assert text_of(tokenizer, plain("hi")) == f"{USER}hi</s>{ASSISTANT}"


def test_a_plain_prompt_stays_plain_where_there_is_no_chat_template(tokenizer):
    tokenizer.chat_template = None
    assert text_of(tokenizer, plain("hi")) == "<s>hi"


def test_chat_false_sends_the_text_alone(tokenizer):
    assert text_of(tokenizer, plain("hi"), chat=False) == "<s>hi"


def test_chat_true_without_a_template_is_refused(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match=r"prompt\.chat"):
        Renderer(tokenizer, PromptConfig(chat=True))


def test_a_rendered_chat_string_is_not_wrapped_again(tokenizer):
    rendered = f"<s>{USER}hi</s>{ASSISTANT}"
    assert text_of(tokenizer, plain(rendered)) == rendered


def test_a_rendered_chat_string_without_bos_is_not_wrapped_either(tokenizer):
    rendered = f"{USER}hi</s>{ASSISTANT}"
    assert text_of(tokenizer, plain(rendered)) == f"<s>{rendered}"


def test_a_second_bos_that_was_asked_for_is_warned_of_once(tokenizer, caplog):
    renderer = Renderer(tokenizer, PromptConfig(chat=False, add_special_tokens=True))
    prompt_ids(renderer, [plain("<s>hi")] * 3)
    assert caplog.text.count("gets a second one") == 1


@pytest.mark.parametrize(
    ("setting", "expected"), [("auto", "<s>hi"), (True, "<s><s>hi"), (False, "<s>hi")]
)
def test_bos_is_never_doubled_unless_asked_for(tokenizer, setting, expected):
    assert text_of(tokenizer, plain("<s>hi"), chat=False, add_special_tokens=setting) == expected


def test_messages_are_tokenized_without_special_tokens_of_their_own(tokenizer):
    assert text_of(tokenizer, chat(("user", "hi"))) == f"{USER}hi</s>{ASSISTANT}"


def test_the_system_message_comes_first(tokenizer):
    assert text_of(tokenizer, chat(("user", "hi")), system="be brief") == (
        f"{USER}be brief</s>{USER}hi</s>{ASSISTANT}"
    )
    assert text_of(tokenizer, plain("hi"), system="be brief").startswith(f"{USER}be brief</s>")


def test_a_last_assistant_message_is_continued(tokenizer):
    continued = text_of(tokenizer, chat(("user", "hi"), ("assistant", "Well,")))
    assert continued == f"{USER}hi</s>{USER}Well,"


def test_parts_of_a_content_are_joined(tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text_of(tokenizer, chat(("user", parts))) == f"{USER}a\nb</s>{ASSISTANT}"


def rendered(tokenizer, *messages, **options):
    """Return what messages become that say how they are rendered."""
    return text_of(tokenizer, replace(chat(*messages), rendering=Rendering(**options)))


def test_a_rows_own_rendering_starts_a_new_answer_unless_it_says_otherwise(tokenizer):
    messages = ("user", "hi"), ("assistant", "Well,")
    assert rendered(tokenizer, *messages) == f"{USER}hi</s>{USER}Well,</s>{ASSISTANT}"
    assert rendered(tokenizer, *messages, add_generation_prompt=False) == (
        f"{USER}hi</s>{USER}Well,</s>"
    )
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert rendered(tokenizer, *messages, **options) == f"{USER}hi</s>{USER}Well,"


def test_a_rows_variables_win_over_those_of_the_recipe(tokenizer):
    options = {"chat_template_kwargs": {"tone": "kind"}}
    recipe = {
        "chat_template": "{{ tone }} {{ name }}",
        "chat_template_kwargs": {"tone": "rude", "name": "me"},
    }
    prompt = replace(chat(("user", "hi")), rendering=Rendering(**options))
    assert text_of(tokenizer, prompt, **recipe) == "kind me"


def test_a_template_must_know_a_variable_that_a_field_stands_for(tokenizer):
    variables = {"reasoning_effort": {"reasoning_effort": "low", "enable_thinking": True}}
    template = "{% if enable_thinking %}think{% endif %}"
    prompt = replace(chat(("user", "hi")), rendering=Rendering(variables=variables))
    assert text_of(tokenizer, prompt, chat_template=template) == "think"
    with pytest.raises(RowError, match="reasoning_effort is not known") as caught:
        rendered(tokenizer, ("user", "hi"), variables=variables)
    assert caught.value.param == "reasoning_effort"


def test_variables_of_a_row_cannot_change_how_the_template_is_applied(tokenizer):
    with pytest.raises(RowError, match="tokenize is no variable"):
        rendered(tokenizer, ("user", "hi"), chat_template_kwargs={"tokenize": True})


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ nothing.at_all.here }}",
        "{% include 'x' %}",
        "{{ range(10**9) }}",
        "{{ 'a'.encode('none') }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_messages_on_which_a_template_fails_fail_alone(tokenizer, template):
    picky = "{% if messages[0].content == 'a' %}" + template + "{% endif %}fine"
    renderer = Renderer(tokenizer, PromptConfig(chat_template=picky))
    refused, good = prompt_ids(renderer, [chat(("user", "a")), chat(("user", "b"))])
    assert isinstance(refused, RowError)
    assert isinstance(good, list)


def test_a_recipes_template_that_is_none_is_refused_at_once(tokenizer):
    with pytest.raises(UsageError, match=r"prompt\.chat_template.*line 1"):
        Renderer(tokenizer, PromptConfig(chat_template="{% for"))


@pytest.mark.parametrize("name", ["tokenize", "messages", "add_generation_prompt", "self"])
def test_variables_of_a_recipe_cannot_change_how_the_template_is_applied(tokenizer, name):
    with pytest.raises(UsageError, match=f"chat_template_kwargs: {name} is no variable"):
        Renderer(tokenizer, PromptConfig(chat_template_kwargs={name: False}))


@pytest.mark.parametrize(
    ("own", "recipe", "expected"),
    [
        (None, "auto", "<s>hi"),
        (None, False, "hi"),
        (True, False, "<s>hi"),
        (False, "auto", "hi"),
    ],
)
def test_a_plain_prompt_of_a_row_is_never_sent_as_chat(tokenizer, own, recipe, expected):
    rendering = Rendering(is_plain=True, add_special_tokens=own)
    prompt = Prompt(text="hi", rendering=rendering)
    assert text_of(tokenizer, prompt, add_special_tokens=recipe) == expected


def test_template_variables_and_own_template(tokenizer):
    template = "{{ tone }}: {{ messages[0].content }}"
    config = {"chat_template": template, "chat_template_kwargs": {"tone": "kind"}}
    assert text_of(tokenizer, plain("hi"), **config) == "kind: hi"


def test_an_own_template_may_be_a_file(tokenizer, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("[{{ messages[0].content }}]")
    assert text_of(tokenizer, plain("hi"), chat_template=str(file)) == "[hi]"


def test_a_missing_template_file_is_refused(tokenizer):
    with pytest.raises(UsageError, match=r"nowhere\.jinja"):
        Renderer(tokenizer, PromptConfig(chat_template="nowhere.jinja"))


def test_messages_that_the_template_refuses_fail_alone(tokenizer):
    prompts = [chat(("user", "a")), chat(("wizard", "b")), chat(("user", "c"))]
    first, refused, last = prompt_ids(Renderer(tokenizer, PromptConfig()), prompts)
    assert isinstance(refused, RowError)
    assert refused.code == "chat_template_failed"
    assert "unknown role wizard" in refused.message
    assert isinstance(first, list)
    assert isinstance(last, list)


def test_token_ids_pass_as_they_are(tokenizer):
    prompt = Prompt(prompt_ids=[5, 6])
    assert prompt_ids(Renderer(tokenizer, PromptConfig()), [prompt]) == [[5, 6]]


def test_a_group_keeps_its_order(tokenizer):
    prompts = [
        plain("one"),
        Prompt(prompt_ids=[9]),
        chat(("user", "two")),
        plain("<s>three"),
    ]
    results = prompt_ids(Renderer(tokenizer, PromptConfig(chat=False)), prompts)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in results]
    assert texts[0] == "one"
    assert results[1] == [9]
    assert texts[2:] == ["two", "three"]


def test_text_without_a_tokenizer_is_a_row_error():
    (error,) = prompt_ids(Renderer(None, PromptConfig()), [plain("hi")])
    assert isinstance(error, RowError)
    assert error.code == "no_tokenizer"
