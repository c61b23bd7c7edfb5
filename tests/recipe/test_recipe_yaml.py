from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbgen.errors import RecipeError
from cbgen.recipe.load import load_recipe
from cbgen.recipe.yaml import parse_recipe_text


def refusal(text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        parse_recipe_text(text, "r.yaml")
    return str(caught.value)


def value(text: str) -> object:
    return parse_recipe_text(f"key: {text}\n", "r.yaml").values["key"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("Off", "Off"),
        ("true", True),
        ("False", False),
        ("", None),
        ("~", None),
        ("null", None),
        ("none", "none"),
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-3.", -3.0),
        ("-.inf", float("-inf")),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("'1e-4'", "1e-4"),
        ("!!str 5", "5"),
        ("!!float 5", 5.0),
        ("paged|eager", "paged|eager"),
        ("[a, 1, [true]]", ["a", 1, [True]]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
    ],
)
def test_plain_values_are_those_of_yaml_1_2(text, expected):
    result = value(text)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.yaml: the recipe is empty; `cbgen init` writes one to start from"),
        ("# nothing\n", "r.yaml: the recipe is empty; `cbgen init` writes one to start from"),
        ("\n- a\n", 'r.yaml:2: expected a mapping of sections (model, prompt, ...), got ["a"]'),
        ("text\n", 'r.yaml:1: expected a mapping of sections (model, prompt, ...), got "text"'),
        ("~\n", "r.yaml:1: expected a mapping of sections (model, prompt, ...), got null"),
        (
            "a: 1\n---\nb: 2\n",
            "r.yaml:2: several YAML documents (---) in one file; a recipe is one",
        ),
        ("a: 1\nb: 2\na: 3\n", "r.yaml:3: the key a is given twice (first: line 1)"),
        ("a: {b: 1,\n 'b': 2}\n", "r.yaml:2: the key b is given twice (first: line 1)"),
        ("[1]: 2\n", "r.yaml:1: a key must be text, not a list or a mapping"),
        ("a: &a [*a]\n", "r.yaml:1: an alias (*) stands inside its own anchor (&)"),
        ("a: &a {<<: *a}\n", "r.yaml:1: an alias (*) stands inside its own anchor (&)"),
        ("a: {<<: 1}\n", "r.yaml:1: `<<` takes a mapping or a list of mappings"),
        ("a: !!int x\n", 'r.yaml:1: "x" is not a value of the tag !!int'),
        ("a: !!bool yes\n", 'r.yaml:1: "yes" is not a value of the tag !!bool'),
        (
            "a: !!python/name:os.system x\n",
            "r.yaml:1: a recipe cannot hold the tag !!python/name:os.system",
        ),
        ("a: !mine {}\n", "r.yaml:1: a recipe cannot hold the tag !mine"),
    ],
)
def test_what_is_not_a_recipe_is_refused_at_its_line(text, message):
    assert refusal(text) == message


def test_a_tab_is_named_with_the_remedy():
    message = refusal("model:\n\tpath: x\n")
    assert message.startswith("r.yaml:2: not valid YAML")
    assert message.endswith("tabs cannot indent YAML, use spaces")


def test_a_colon_in_plain_text_is_named_with_the_remedy():
    message = refusal("prompt:\n  template: Question: {q}\n")
    assert message.startswith("r.yaml:2: not valid YAML")
    assert message.endswith("put text that holds `: ` in quotes")


def test_an_unfinished_quote_is_refused():
    assert refusal("a: 1\nb: 'x\n").startswith("r.yaml:3: not valid YAML")


def test_a_control_character_is_refused_at_its_line():
    assert refusal("a: 1\nb: \x07\n").startswith("r.yaml:2: not valid YAML")


@pytest.mark.parametrize("start", ["9", "0x9"])
def test_a_number_of_five_thousand_digits_is_refused(start):
    assert "is not a value of the tag !!int" in refusal(f"a: {start}" + "9" * 5000)


def test_deep_nesting_is_refused():
    assert "nested" in refusal("a: " + "[" * 60 + "]" * 60)
    assert "nested" in refusal("a: " + "[" * 5000 + "]" * 5000)


def test_exponential_aliases_are_refused():
    lines = ["a0: &a0 [x]"] + [
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)
    ]
    assert "aliases counted each time" in refusal("\n".join(lines))


def test_anchors_and_merge_keys_work_and_own_keys_win():
    tree = parse_recipe_text("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  y: 3\n", "r.yaml")
    assert tree.values["b"] == {"x": 1, "y": 3}


def test_a_merged_key_has_the_line_where_it_was_written():
    tree = parse_recipe_text("a: &a\n  x: 1\nb:\n  <<: *a\n", "r.yaml")
    assert tree.place(("b", "x")).line == 2


def test_a_file_that_is_not_utf_8_is_refused_at_its_line(recipe_path):
    recipe_path.write_bytes("model:\n  path: caf\u00e9\n".encode("latin-1"))
    with pytest.raises(RecipeError, match=r"^recipe\.yaml:2: not UTF-8: byte 0xe9; save the file"):
        load_recipe("recipe.yaml")


def test_a_byte_order_mark_and_carriage_returns_do_not_matter(recipe_path):
    recipe_path.write_bytes(b"\xef\xbb\xbfmodel:\r\n  path: tiny\r\n")
    assert load_recipe("recipe.yaml").model.path == "tiny"


@given(st.text(alphabet=st.sampled_from("ab:-[]{}&*<!|>'\"#,?%@`~ \n\t019.e"), max_size=40))
def test_any_text_gives_a_tree_or_a_recipe_error(text):
    try:
        tree = parse_recipe_text(text, "r.yaml")
    except RecipeError:
        return
    assert isinstance(tree.values, dict)
