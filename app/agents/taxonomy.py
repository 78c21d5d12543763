"""Lists every ending of every framework, whose fault it is and what follows, from the adapters' tables.

python -m app.agents.taxonomy      prints the table of docs/howto/agents.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from app.agents.external import result
from app.agents.frameworks import FRAMEWORKS, FrameworkOptions, framework_named
from app.agents.installation import Installer
from app.models.endings import BLAME, Blame, EndReason

WHAT_FOLLOWS: Mapping[Blame, str] = {
    Blame.RESULT: "graded, counts, never again",
    Blame.INFRASTRUCTURE: "again, up to `max_attempts`; else not scored",
    Blame.PERSON: "ends, does not count",
    Blame.INTERRUPTION: "again, without using up an attempt",
}
EXTERNAL = "external agents"


@dataclass(frozen=True, slots=True)
class EndingRow:
    """One ending: the framework's own word, and what it means."""

    agent: str
    word: str
    reason: EndReason

    @property
    def blame(self) -> Blame:
        return BLAME[self.reason]


def tables() -> dict[str, Mapping[str, EndReason]]:
    """The endings of every framework by its name, and of external agents."""
    making = FrameworkOptions(Installer(Path("/"), may_install=False))
    found = {name: framework_named(name, making).endings for name in FRAMEWORKS}
    return found | {EXTERNAL: result.ENDINGS}


def rows(found: Mapping[str, Mapping[str, EndReason]]) -> Iterator[EndingRow]:
    """Ordered as the adapters have them."""
    for agent, endings in found.items():
        for word, reason in endings.items():
            yield EndingRow(agent, word, reason)


def markdown(found: Iterable[EndingRow]) -> str:
    """A row for each end reason of each framework, with all the words that mean it."""
    words: dict[tuple[str, EndReason], list[str]] = {}
    for row in found:
        words.setdefault((row.agent, row.reason), []).append(f"`{row.word}`")
    lines = ["| agent | its own word | end reason | whose | what follows |", "|---|---|---|---|---|"]
    for (agent, reason), said in words.items():
        blame = BLAME[reason]
        lines.append(f"| {agent} | {', '.join(said)} | `{reason}` | {blame} | {WHAT_FOLLOWS[blame]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(rows(tables())), end="")
