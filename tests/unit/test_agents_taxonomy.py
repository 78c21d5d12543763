"""The failure taxonomy: the document says what the adapters' tables say, and no table lets a fault count."""

from __future__ import annotations

from pathlib import Path

from app.agents.frameworks import FRAMEWORKS
from app.agents.taxonomy import EXTERNAL, WHAT_FOLLOWS, EndingRow, markdown, rows, tables
from app.models.endings import BLAME, Blame, EndReason

DOCUMENT = Path(__file__).parents[2] / "docs" / "howto" / "agents.md"


def test_the_document_has_the_table_of_the_adapters() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    _, _, after = text.partition("<!-- endings: made by `python -m app.agents.taxonomy` -->\n")
    written, mark, _ = after.partition("<!-- /endings -->")
    assert mark
    assert written == markdown(rows(tables())), (
        "run `python -m app.agents.taxonomy` and put it into docs/howto/agents.md"
    )


def test_every_framework_is_in_it_and_tells_of_success_and_of_failure() -> None:
    found = tables()
    assert set(found) == {*FRAMEWORKS, EXTERNAL}
    for agent, endings in found.items():
        reasons = set(endings.values())
        assert EndReason.SUBMITTED in reasons, agent
        assert EndReason.STEP_LIMIT in reasons, agent
        assert EndReason.AGENT_ERROR in reasons, agent
        assert EndReason.MODEL_ERROR in reasons, agent


def test_no_framework_says_what_only_we_can_know() -> None:
    """That somebody cancelled, that a worker was lost, what a grader made of it."""
    ours = {reason for reason, blame in BLAME.items() if blame in (Blame.PERSON, Blame.INTERRUPTION)}
    ours |= {EndReason.LOST, EndReason.DEADLINE, EndReason.GRADING_ERROR}
    assert [row for row in rows(tables()) if row.reason in ours] == []


def test_every_blame_has_its_rule_and_every_row_a_blame() -> None:
    assert set(WHAT_FOLLOWS) == set(Blame)
    assert EndingRow("a", "w", EndReason.MODEL_ERROR).blame is Blame.INFRASTRUCTURE
