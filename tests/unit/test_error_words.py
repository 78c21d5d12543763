"""Errors in our words: what a value should have been, and the nearest name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from app.cli import demo
from app.errors import UnknownName, explained
from app.models.outcome import Verdict
from tests.building import a_result


class Form(BaseModel):
    model_config = ConfigDict(extra="forbid")
    count: Annotated[int, Field(ge=1, le=9)] = 1
    share: Annotated[float, Field(gt=0.5)] = 1.0
    name: Annotated[str, Field(max_length=3, pattern="^a")] = "a"
    kind: Literal["one", "two"] = "one"
    names: tuple[str, ...] = ()
    own: int = 0

    @field_validator("own")
    @classmethod
    def _own(cls, value: int) -> int:
        if value:
            raise ValueError(f"expected nothing; found {value}")
        return value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"count": 0}, "expected at least 1"),
        ({"count": "many"}, "expected a whole number"),
        ({"share": 0.5}, "expected more than 0.5"),
        ({"name": "long"}, "expected at most 3 characters"),
        ({"name": "b"}, "expected a text that fits ^a"),
        ({"name": 1}, "expected a text"),
        ({"kind": "three"}, "expected 'one' or 'two'"),
        ({"names": 1}, "expected a list"),
        ({"colour": 1}, "expected no such key"),
        ({"own": 3}, "expected nothing; found 3"),
    ],
)
def test_a_value_is_refused_in_our_words(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Form(**given)
    assert explained(caught.value.errors()[0]) == words  # type: ignore[arg-type]


def test_an_unknown_name_comes_with_the_nearest() -> None:
    known = ["mini-swe-agent", "oracle"]
    assert str(UnknownName.of("agent", "mini-swe-agnet", known)) == (
        "unknown agent 'mini-swe-agnet'; did you mean mini-swe-agent? known: mini-swe-agent, oracle"
    )
    assert str(UnknownName.of("agent", "x", known)) == "unknown agent 'x'; known: mini-swe-agent, oracle"


def test_the_demo_says_why_a_reward_is_unexpected_and_what_to_try(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [__file__])
    said = "1 of 2 tests did not pass:\ntests/a.py failed"
    wrong = a_result(verdict=Verdict(reward=0.0, counts=True, detail=said))
    demo._print_results([wrong], [wrong])
    said = capsys.readouterr().out
    assert "reward 0, expected 1: 1 of 2 tests did not pass: tests/a.py failed; try `" in said
    assert f"logs {str(wrong.task_id)[-12:]}`" in said
