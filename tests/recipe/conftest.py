from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cbgen.errors import RecipeError
from cbgen.recipe.load import load_recipe
from cbgen.recipe.schema import Recipe

MODEL = "model: {path: tiny}\n"
"""The shortest section that a recipe needs; one line."""


@pytest.fixture
def recipe_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("recipe.yaml")


@pytest.fixture
def load(recipe_path: Path) -> Callable[..., Recipe]:
    """Load the model section and the given text, so that the text begins on line 2."""

    def load(text: str = "", *overrides: str, model: str = MODEL) -> Recipe:
        recipe_path.write_text(model + text, encoding="utf-8")
        return load_recipe(str(recipe_path), overrides)

    return load


@pytest.fixture
def refusal(load: Callable[..., Recipe]) -> Callable[..., str]:
    """Return the message with which a recipe is refused; its text begins on line 2."""

    def refusal(text: str = "", *overrides: str, model: str = MODEL) -> str:
        with pytest.raises(RecipeError) as caught:
            load(text, *overrides, model=model)
        return str(caught.value)

    return refusal
