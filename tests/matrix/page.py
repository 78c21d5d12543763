"""Writes docs/compatibility.md and docs/compatibility.json from the records of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.matrix.fixture import Fixture, Kind
from tests.matrix.run import FRAMEWORKS, OURS, Record

_LIBRARIES = ("swebench", "swesmith", "multi-swe-bench")
_EVIDENCE = ("patch", "trajectory", "test_report")
_LONGEST = 160  # characters of a reason

_HEAD = """# Compatibility

Every framework on every dataset of the paper's table 1, and on the others that are known by name, on replayed models
and through the real path: the public client, the scheduler, workers, containers, the model gateway, grading.
`make matrix` writes this page and [its data](compatibility.json). This one is of {date}, commit {commit}:
{real} of {cells} cells are `real`, {stand_in} `stand-in`, {other} neither; it took {minutes:.0f} minutes.

**What it shows:** that each framework works in a dataset's image, and that its patch is judged by that dataset's rules.

**What it does not show:** that a model solves anything (the answers are scripted), or that the published images work:
none is here. Each dataset is a fixture of three tasks, written from the published schema, in an image built here under
the name that the dataset gives it. All have the same small Python repository; where a dataset's commands ask for
another tool (pip, make, cargo, conda), a small program stands in for it. They are in [tests/matrix](../tests/matrix).

| state | is |
|---|---|
| **real** | the framework as its package index has it; it ended by itself, and both tasks got the right verdict |
| stand-in | the same with a stand-in of SWE-agent, which is on no package index |
| not run (reason) | no verdict, or not the one that is right |

`MEGAFLOW_SWE_AGENT_SOURCE=URL@REF make matrix` runs the real SWE-agent.
"""
_TASKS = """
## Verdicts

Of each fixture's tasks `right` has a right answer, `wrong` has one that is not, and `peculiar` a right one, and what
only this dataset has. The agent oracle gives the answer, nop gives nothing, cheat attacks the grading
(`megaflow dataset validate`). The rewards that are right, derived by hand, are oracle 1, 0, 1 and nop and cheat
0, 0, 0. Where a dataset's own library judged, it is named.

| dataset | judged by | oracle: right, wrong, peculiar | nop: the same | cheat: same | the peculiarity | schema from |
|---|---|---|---|---|---|---|
"""
_DETAILS = """
## Cells

In each cell one task ran on an ephemeral instance and one on a standing one. Evidence: the first twelve digits of the
sha256 of artifacts that the attempt left; all of them, and whole reasons, are in [the data](compatibility.json).

| cell | task | mode | end reason | reward (right) | judged by | evidence | date |
|---|---|---|---|---|---|---|---|
"""


def write(records: Sequence[Record], fixtures: Sequence[Fixture], folder: Path, *, commit: str, minutes: float) -> None:
    """Both files."""
    states = {
        (fixture.title, agent): state_of(cell(records, fixture.title, agent))
        for fixture in fixtures
        for agent in FRAMEWORKS
    }
    counts = {word: sum(state == word for state in states.values()) for word in ("real", "stand-in")}
    head = _HEAD.format(
        date=max((record.date for record in records), default="-"),
        commit=commit,
        cells=len(states),
        real=counts["real"],
        stand_in=counts["stand-in"],
        other=len(states) - sum(counts.values()),
        minutes=minutes,
    )
    parts = [
        head,
        "\n## The paper's ten datasets\n\n",
        _table([fixture for fixture in fixtures if fixture.in_table], states),
        "\n## Beyond the paper\n\n",
        _table([fixture for fixture in fixtures if not fixture.in_table], states),
        _TASKS,
        *(_verdicts(records, fixture) for fixture in fixtures),
        _DETAILS,
        *(_details(records, fixture.title, agent) for fixture in fixtures for agent in FRAMEWORKS),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compatibility.md").write_text("".join(parts))
    lines = ",\n".join(json.dumps(one.model_dump(mode="json")) for one in records)
    about = f'"commit": {json.dumps(commit)}, "minutes": {minutes:.1f}'
    (folder / "compatibility.json").write_text(f'{{{about}, "records": [\n{lines}\n]}}\n')


def cell(records: Iterable[Record], title: str, agent: str) -> list[Record]:
    """The records of one cell, in the order of the kinds."""
    found = [record for record in records if (record.dataset, record.agent) == (title, agent)]
    return sorted(found, key=lambda record: list(Kind).index(record.kind))


def state_of(found: Sequence[Record]) -> str:
    """`real`, `stand-in`, or `not run (reason)`."""
    if not found:
        return "not run (not asked for)"
    for record in found:
        if not record.as_expected:
            return f"not run ({_short(record.reason)})"
    return "stand-in" if any(record.stand_in for record in found) else "real"


def judged_by(grader: str) -> str:
    """The library, or that the right verdict was derived by hand."""
    return grader if grader.startswith(_LIBRARIES) else f"by hand ({grader or 'no verdict'})"


def _table(fixtures: Sequence[Fixture], states: dict[tuple[str, str], str]) -> str:
    lines = [f"| dataset | {' | '.join(FRAMEWORKS)} |", f"|---{'|---' * len(FRAMEWORKS)}|"]
    for fixture in fixtures:
        cells = (_linked(states[fixture.title, agent], fixture.title, agent) for agent in FRAMEWORKS)
        lines.append(f"| {fixture.title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _linked(state: str, title: str, agent: str) -> str:
    shown = f"✓ **{state}**" if state == "real" else state
    return f"[{shown}](#{_anchor(title, agent)})"


def _anchor(title: str, agent: str) -> str:
    return f"{title}-{agent}".lower().replace(" ", "-")


def _verdicts(records: Sequence[Record], fixture: Fixture) -> str:
    rewards = {agent: [_reward(record) for record in cell(records, fixture.title, agent)] for agent in OURS}
    graders = sorted({judged_by(one.grader) for agent in OURS for one in cell(records, fixture.title, agent)})
    words = (fixture.title, "; ".join(graders), *(", ".join(rewards[agent]) for agent in OURS))
    return f"| {' | '.join((*words, fixture.peculiarity, fixture.source))} |\n"


def _reward(record: Record) -> str:
    if record.as_expected:
        return f"{record.reward:g}"
    return f"**{_short(record.reason)}**"


def _details(records: Sequence[Record], title: str, agent: str) -> str:
    lines = []
    for number, record in enumerate(cell(records, title, agent)):
        name = f'<a id="{_anchor(title, agent)}"></a>{title}, {agent} {record.agent_version}' if number == 0 else ""
        reward = f"{'none' if record.reward is None else f'{record.reward:g}'} ({record.expected:g})"
        kept = record.artifacts
        evidence = " ".join(f"{kind} `{kept[kind][:12]}`" for kind in _EVIDENCE if kind in kept)
        words = (name, f"{record.task} ({record.kind.value})", record.mode, record.end_reason or record.state, reward)
        lines.append(f"| {' | '.join((*words, judged_by(record.grader), evidence or '-', record.date))} |\n")
    return "".join(lines)


def _short(reason: str) -> str:
    words = " ".join(reason.replace("|", "/").split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…"
