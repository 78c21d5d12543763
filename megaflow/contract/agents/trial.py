"""Defines a small task with scripted model answers, for the contract tests.

The caller provides an environment with sh and git, and a replay server that serves `write_scripts`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from app.agents.base import Agent, AgentJob, AgentReport, ModelEndpoint
from app.errors import EnvironmentFailed
from app.models.shell import CancelToken, Shell
from app.models.spec import Limits

WORKDIR = "/testbed"
KEY = "sk-megaflow-trial-0123456789abcdef"
"""Key of the trial's model: afterwards it must not be stored anywhere."""
DESCRIPTION = "In cart.py, total() forgets the last item. Correct it, and change nothing else."
STARTED = "started.txt"
"""File in the working folder, written by the first command of every scene that has one, except `solve`."""

_BUG = "def total(items):\n    return sum(items[:-1])\n"
_FIXED = "def total(items):\n    return sum(items)\n"
_REPOSITORY = f"""\
set -e
cat > cart.py <<'END'
{_BUG}END
git init -q . && git add -A
git -c user.name=trial -c user.email=trial@example.org commit -q -m start
"""
_BEGIN = f'{{thought: I begin, command: "echo begun > {STARTED}"}}'
_NEVER_S = 3600

SCENES: Mapping[str, str] = {
    "solve": r"""[{thought: Let me look, command: "cat cart.py"},
      {thought: Off by one, command: "sed -i 's/items.:-1./items/' cart.py && git --no-pager diff"},
      {thought: Done, submit: true}]""",
    "endless": "[" + ", ".join(f'{{thought: Once more, command: "echo turn {turn}"}}' for turn in range(40)) + "]",
    "refused": f'[{{status: 401, message: "Incorrect API key provided: {KEY}"}}]',
    "busy": "[{status: 429, retry_after_s: 1}]",
    "broken": "[{status: 500}]",
    "overloaded": "[{status: 503}]",
    "garbage": "[{garbage: true}]",
    "cut": "[{thought: I was about to say something rather long about this, cut: true}]",
    "silent": f"[{{delay_s: {_NEVER_S}, thought: never said}}]",
    "too-long": f"[{_BEGIN}, {{context_exceeded: true}}]",
    "breaks-later": f"[{_BEGIN}, {{status: 500}}]",
    "works": f'[{_BEGIN}, {{thought: This takes long, command: "tail -n 0 -f /dev/null"}}, {{submit: true}}]',
}
"""Turns of the scripted model by scene name; the model's name is `scenario-trial-NAME`."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a trial. `diff` is the agent's change, `untracked` the files that it added."""

    report: AgentReport
    solved: bool
    diff: str
    untracked: tuple[str, ...]
    took_s: float


@dataclass(frozen=True, slots=True)
class TrialStage:
    """Environment and model endpoint for trials."""

    environment: Shell
    base_url: str  # of the inference server, with /v1
    inside_url: str | None = None  # the same from inside
    tools_inside: Mapping[str, str] = field(default_factory=dict)

    def prepare(self) -> None:
        """Creates the toy repository. Raises: EnvironmentFailed: it cannot be created here."""
        result = self.environment.run(_REPOSITORY, timeout_s=60)
        if not result.ok:
            raise EnvironmentFailed(f"expected an environment with sh and git; found {result.text().strip()[-500:]}")

    def job(self, scene: str, scratch: Path, limits: Limits) -> AgentJob:
        return AgentJob(
            task_name=f"trial-{scene}",
            description=DESCRIPTION,
            workdir=WORKDIR,
            limits=limits,
            model=ModelEndpoint(self.base_url, f"scenario-trial-{scene}", SecretStr(KEY)),
            solution=None,
            solution_files=None,
            scratch=scratch,
            model_inside_url=self.inside_url,
            tools_inside=self.tools_inside,
        )

    def play(self, agent: Agent, scene: str, scratch: Path, limits: Limits, cancel: CancelToken) -> Trial:
        """Raises: errors of the agent."""
        begun = time.monotonic()
        report = agent.run(self.job(scene, scratch, limits), self.environment, cancel)
        took_s = time.monotonic() - begun
        diff = self.environment.run("git --no-pager diff", timeout_s=60).text()
        added = self.environment.run("git ls-files --others --exclude-standard", timeout_s=60).text().split()
        solved = self.environment.get(f"{WORKDIR}/cart.py").decode() == _FIXED
        return Trial(report, solved, diff, tuple(added), took_s)


class NeverCancelled:
    """A token that is never cancelled."""

    def is_set(self) -> bool:
        return False

    def on_cancel(self, callback: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


def write_scripts(folder: Path) -> None:
    """Writes the scenes, for `python -m app.model_service.replay --scripts FOLDER`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, turns in SCENES.items():
        (folder / f"trial-{name}.yaml").write_text(f"match: null\nturns: {turns}\n", encoding="utf-8")
