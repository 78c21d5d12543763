"""Claude Code and Qwen Code themselves, in a container without a network, against a scripted model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from app.agents.claude_code.adapter import ClaudeCode
from app.agents.framework import Framework
from app.agents.installation import Installer
from app.agents.qwen_code.adapter import QwenCode
from app.agents.running import FrameworkAgent
from app.models.endings import EndReason
from app.models.shell import InteractiveProgram, Shell
from app.models.spec import Limits
from megaflow.contract.agents.trial import KEY, NeverCancelled, TrialStage
from tests.integration.inside_fixture import ENV_SCENE, SEEN, engine, kept_tools, look_inside, settings, stage

__all__ = ["engine", "settings", "stage"]

pytestmark = [pytest.mark.agents, pytest.mark.docker, pytest.mark.extra]

LIMITS = Limits(agent_timeout_s=300, command_timeout_s=30, max_steps=5)
SCENES = {
    "look": ENV_SCENE,
    "words": "[{thought: I think that it is fine}]",
    "slow": "[{command: 'echo begun; sleep 600; echo never'}, {submit: true}]",
    "quick": "[{submit: true}]",
}


@dataclass(frozen=True)
class Kind:
    """One of the two. `leads_away`: files of a repository that would have it speak to another model."""

    name: str
    framework: Callable[..., Framework]
    own_variables: tuple[str, ...]
    leads_away: Mapping[str, bytes]
    words: Callable[[dict[str, Any]], list[str]]  # of a message in its session


CLAUDE = Kind(
    "claude",
    ClaudeCode,
    ("ANTHROPIC", "API_TIMEOUT_MS", "IS_SANDBOX"),
    # A project's settings go before the process's variables, but not before the settings that we name.
    {
        ".claude/settings.json": json.dumps(
            {"env": {"ANTHROPIC_BASE_URL": "http://127.0.0.1:9", "CLAUDE_CODE_MAX_RETRIES": "0"}}
        ).encode()
    },
    lambda message: [str(message["content"])],
)
QWEN = Kind(
    "qwen",
    QwenCode,
    ("OPENAI", "QWEN_HOME", "BASH_ENV"),
    # A project's settings go before the user's, but not before those of the system, which are ours.
    {
        ".qwen/settings.json": json.dumps(
            {
                "model": {"name": "another", "generationConfig": {"timeout": 1}},
                "privacy": {"usageStatisticsEnabled": True},
            }
        ).encode(),
        ".env": b"OPENAI_BASE_URL=http://127.0.0.1:9/v1\nOPENAI_API_KEY=another\n",
    },
    lambda message: [part.get("text", "") for part in message["parts"]],
)
only_qwen = pytest.mark.parametrize("kind", [QWEN], indirect=True, ids=["qwen"])


@pytest.fixture(scope="module", params=[CLAUDE, QWEN], ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(scope="module")
def framework(kind: Kind) -> Framework:
    made = kind.framework(Installer(kept_tools()), call_timeout_s=60, call_attempts=2)
    made.install()
    return made


class Exporting:
    """An environment whose image has more variables."""

    def __init__(self, shell: Shell, **variables: str) -> None:
        self._shell, self._variables = shell, variables

    def stream(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **more: Any) -> InteractiveProgram:
        return self._shell.stream(argv, env={**self._variables, **(env or {})}, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shell, name)


def test_its_commands_run_as_the_tasks_own_and_see_nothing_of_it(
    kind: Kind, stage: TrialStage, framework: Framework, tmp_path: Path
) -> None:
    framework.suits(stage.environment)
    look_inside(stage, framework, tmp_path, LIMITS, *kind.own_variables)
    left = stage.environment.run(f"ls -A $HOME | grep -i {kind.name}", timeout_s=20).text()
    assert left == "", "its state belongs into a folder of its own"


@only_qwen
def test_what_an_image_has_bash_read_first_is_read(stage: TrialStage, framework: Framework, tmp_path: Path) -> None:
    stage.environment.put("/etc/first.sh", b"export FROM_THE_IMAGE=yes\n")
    here = Exporting(stage.environment, BASH_ENV="/etc/first.sh")
    report = FrameworkAgent(framework).run(stage.job("look", tmp_path, LIMITS), here, NeverCancelled())
    assert report.end_reason is EndReason.SUBMITTED, report
    seen = stage.environment.get(f"/testbed/{SEEN}").decode()
    assert "FROM_THE_IMAGE=yes\n" in seen
    assert "BASH_ENV=/etc/first.sh\n" in seen
    assert KEY not in seen


def test_a_command_over_its_limit_does_not_hold_it_up(stage: TrialStage, framework: Framework, tmp_path: Path) -> None:
    hasty = LIMITS.model_copy(update={"command_timeout_s": 1.0})
    trial = stage.play(FrameworkAgent(framework), "slow", tmp_path, hasty, NeverCancelled())
    assert trial.report.end_reason is EndReason.SUBMITTED, trial.report
    assert trial.report.steps == 2


def test_a_repository_cannot_lead_it_away_from_its_model(
    kind: Kind, stage: TrialStage, framework: Framework, tmp_path: Path
) -> None:
    for name, content in kind.leads_away.items():
        stage.environment.put(f"/testbed/{name}", content)
    report = stage.play(FrameworkAgent(framework), "words", tmp_path, LIMITS, NeverCancelled()).report
    assert report.end_reason is EndReason.SUBMITTED, report


@pytest.mark.parametrize("more", ["", "x" * 300_000], ids=["short", "longer than an argument may be"])
def test_the_tasks_text_arrives_as_it_is(
    kind: Kind, stage: TrialStage, framework: Framework, tmp_path: Path, more: str
) -> None:
    text = f"--mend it: 'quotes', $(no command), \\ and ümläute.\n{more}"
    job = replace(stage.job("quick", tmp_path, LIMITS), description=text)
    report = FrameworkAgent(framework).run(job, stage.environment, NeverCancelled())
    assert report.end_reason is EndReason.SUBMITTED, report
    assert report.files is not None
    (session,) = (report.files / kind.name / "projects").rglob("*.jsonl")
    lines = [json.loads(line) for line in session.read_text().splitlines() if line.startswith("{")]
    said = [words for line in lines if line["type"] == "user" for words in kind.words(line["message"])]
    assert text.strip() in [words.strip() for words in said]
