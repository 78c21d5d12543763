"""What a call costs: the user's table first, a provider's list only where that provider answered, else unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import SettingsInvalid
from app.model_service.prices import Price, Prices
from app.models.model_calls import TokenUse

USE = TokenUse(prompt=1_000_000, completion=100_000, cached=400_000, stored=100_000)
PROVIDER = "https://api.openai.com/v1"


def test_the_users_table_goes_first() -> None:
    own = Prices({"gpt-4o": Price(1, 10)})
    assert own.cost(USE, model="gpt-4o", url=PROVIDER) == pytest.approx(1 + 1)
    assert own.cost(USE, model="stable", upstream_model="gpt-4o", url="http://engine.test/v1") == pytest.approx(2)


def test_what_comes_from_the_cache_and_goes_there_has_prices_of_its_own() -> None:
    assert Price(10, 0, cached=1, stored=20).of(USE) == pytest.approx(0.5 * 10 + 0.4 * 1 + 0.1 * 20)
    assert Price(10, 0).of(USE) == pytest.approx(10)


def test_the_longest_pattern_that_fits_counts_and_a_name_goes_before() -> None:
    own = Prices({"*": Price(1, 0), "replay:*": Price(2, 0), "replay:night": Price(3, 0)})
    assert [own.cost(USE, model=name) for name in ("x", "replay:day", "replay:night")] == [1, 2, 3]


def test_the_built_in_engine_costs_nothing_even_when_it_does_not_count() -> None:
    assert Prices().cost(TokenUse(), model="replay", built_in=True) == 0.0
    assert Prices().cost(USE, model="replay:night", built_in=True) == 0.0
    assert Prices().cost(USE, model="replay:night", url="http://engine.test/v1") is None, "a name is only a word"


def test_a_providers_list_counts_where_that_provider_answered_and_nowhere_else() -> None:
    known = Prices()
    assert known.cost(TokenUse(1000, 100), model="gpt-4o", url=PROVIDER) == pytest.approx(0.0035)
    assert known.cost(TokenUse(1000, 100), model="gpt-4o", url="http://engine.test/v1") is None
    assert known.cost(TokenUse(1000, 100), model="gpt-4o") is None
    assert known.cost(TokenUse(1000, 100), model="no-such-model", url=PROVIDER) is None
    assert known.cost(TokenUse(), model="gpt-4o", url=PROVIDER) is None
    assert known.cost(TokenUse(1, 1, 5), model="gpt-4o", url=PROVIDER) is None
    assert known.cost(TokenUse(1000, 100), model="gpt-4o", url=PROVIDER) is not None


def test_a_price_without_a_count_is_unknown() -> None:
    assert Prices({"m": Price(1, 1)}).cost(TokenUse(prompt=5), model="m") is None


def test_the_table_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("m: {prompt: 1, completion: 2.5, cached: 0}\n")
    assert Prices.read(path).cost(USE, model="m") == pytest.approx(0.6 + 0.25)
    assert Prices.read(None).cost(USE, model="m") is None


@pytest.mark.parametrize(
    "content",
    [
        "- m",
        "m: 3",
        "m: {prompt: 1}",
        "m: {prompt: 1, completion: -1}",
        "m: {prompt: 1, completion: yes}",
        "m: {prompt: 1, completion: .inf}",
        "m: {prompt: 1, completion: 1, cache: 1}",
        "m: {prompt: '1', completion: 1}",
        "{",
        None,
    ],
)
def test_a_bad_table_is_refused_and_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "prices.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsInvalid, match=r"prices\.yaml"):
        Prices.read(path)
