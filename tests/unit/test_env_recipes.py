"""`megaflow env build`: what a recipe's file may say, how a wrong one is refused, and what environments cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli.env import BuiltEnvironment, cost_of
from app.errors import SpecInvalid
from app.recipes import recipe
from app.recipes.image import BuiltImage


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


def test_the_time_of_a_failed_build_is_part_of_what_each_built_one_cost() -> None:
    image = BuiltImage("sha256:1", "i", "r==1", "3.11", (), image_bytes=10, fetched_bytes=4)
    found = [BuiltEnvironment("a", image=image, seconds=20.0), BuiltEnvironment("b", error="no wheel", seconds=40.0)]
    assert cost_of(found) == {"count": 1, "seconds_each": 60.0, "fetched_bytes_each": 4, "image_bytes_each": 10}
