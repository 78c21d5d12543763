"""The recipe of `megaflow env build`: what a file may say, and how a wrong one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import SpecInvalid
from app.recipes import recipe


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("image = 3\n", "field image: expected a text; found '3'"),
        ("image = 'x'\nnothing = 1\n", "field nothing: expected no such key; found '1'"),
        ("= 1\n", "expected a recipe in TOML"),
    ],
)
def test_a_recipe_of_another_form_is_refused_by_its_field(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(content)
    with pytest.raises(SpecInvalid) as refused:
        recipe.read(file)
    assert words in str(refused.value)
