"""Qwen Code itself, in a container without a network, against a scripted model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.agents.framework import FrameworkBundle
from app.agents.installation import Installer
from app.agents.qwen_code.adapter import QwenCode
from app.agents.running import FrameworkAgent
from app.agents.trial import KEY, NeverCancelled, TrialStage
from app.models.endings import EndReason
from app.models.shell import InteractiveProgram, Shell
from app.models.spec import Limits
from app.settings import Settings
from tests.integration.inside_ground import ENV_SCENE, SEEN, container_stage, kept_tools, scripted_engine, settings

__all__ = ["settings"]

pytestmark = [pytest.mark.agents, pytest.mark.docker]

LIMITS = Limits(agent_timeout_s=300, command_timeout_s=30, max_steps=5)
SCENES = {
    "look": ENV_SCENE,
    "words": "[{thought: I think that it is fine}]",
    "slow": "[{command: 'echo begun; sleep 600; echo never'}, {submit: true}]",
    "quick": "[{submit: true}]",
    "same": "[" + "{command: 'echo the same'}, " * 9 + "{submit: true}]",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted_engine(tmp_path_factory.mktemp("scenes"), **SCENES) as url:
        yield url


@pytest.fixture(scope="module")
def framework() -> QwenCode:
    made = QwenCode(Installer(kept_tools()), call_timeout_s=60, call_attempts=2)
    made.install()
    return made


@pytest.fixture
def bundle(framework: QwenCode) -> FrameworkBundle:
    return framework.install()


@pytest.fixture
def stage(settings: Settings, base_image_tag: str, bundle: FrameworkBundle, engine: str) -> Iterator[TrialStage]:
    with container_stage(settings, base_image_tag, bundle, engine) as made:
        yield made


class Exporting:
    """An environment whose image has more variables."""

    def __init__(self, shell: Shell, **variables: str) -> None:
        self._shell, self._variables = shell, variables

    def stream(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **more: Any) -> InteractiveProgram:
        return self._shell.stream(argv, env={**self._variables, **(env or {})}, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shell, name)


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.startswith("{")]


def test_it_solves_a_task_and_leaves_its_session(stage: TrialStage, framework: QwenCode, tmp_path: Path) -> None:
    framework.suits(stage.environment)
    trial = stage.play(FrameworkAgent(framework), "solve", tmp_path, LIMITS, NeverCancelled())
    report = trial.report
    assert report.end_reason is EndReason.SUBMITTED, report
    assert trial.solved
    assert trial.untracked == ()
    assert report.steps == 3
    assert report.usage["prompt_tokens"] > report.usage["completion_tokens"] > 0
    assert report.files is not None
    sessions = list((report.files / "qwen" / "projects").rglob("*.jsonl"))
    assert len(sessions) == 1
    assert {"user", "assistant"} <= {line["type"] for line in lines(sessions[0])}


def test_its_commands_run_as_the_tasks_own_and_see_nothing_of_it(
    stage: TrialStage, framework: QwenCode, tmp_path: Path
) -> None:
    trial = stage.play(FrameworkAgent(framework), "look", tmp_path, LIMITS, NeverCancelled())
    assert trial.report.end_reason is EndReason.SUBMITTED, trial.report
    seen = stage.environment.get(f"/testbed/{SEEN}").decode()
    home = stage.environment.run("echo $HOME", timeout_s=20).stdout.decode().strip()
    assert f"HOME={home}\n" in seen
    for foreign in (KEY, "OPENAI", "QWEN_HOME", "BASH_ENV"):
        assert foreign not in seen
    left = stage.environment.run(f"ls -A {home} | grep -i qwen", timeout_s=20).text()
    assert left == "", "its state belongs into a folder of its own"


def test_what_an_image_has_bash_read_first_is_read(stage: TrialStage, framework: QwenCode, tmp_path: Path) -> None:
    stage.environment.put("/etc/first.sh", b"export FROM_THE_IMAGE=yes\n")
    here = Exporting(stage.environment, BASH_ENV="/etc/first.sh")
    report = FrameworkAgent(framework).run(stage.job("look", tmp_path, LIMITS), here, NeverCancelled())
    assert report.end_reason is EndReason.SUBMITTED, report
    seen = stage.environment.get(f"/testbed/{SEEN}").decode()
    assert "FROM_THE_IMAGE=yes\n" in seen
    assert "BASH_ENV=/etc/first.sh\n" in seen
    assert KEY not in seen


@pytest.mark.parametrize(
    ("scene", "reason", "said"),
    [
        ("words", EndReason.SUBMITTED, ""),
        ("endless", EndReason.STEP_LIMIT, "exit code 53"),
        ("refused", EndReason.MODEL_ERROR, "error_during_execution: [API Error: 401"),
        ("garbage", EndReason.MODEL_ERROR, "error_during_execution: [API Error"),
        ("same", EndReason.AGENT_ERROR, "error_during_execution"),
        ("too-long", EndReason.CONTEXT_EXHAUSTED, "error_during_execution: [API Error: 400"),
    ],
)
def test_endings_by_name(
    stage: TrialStage, framework: QwenCode, tmp_path: Path, scene: str, reason: EndReason, said: str
) -> None:
    report = stage.play(FrameworkAgent(framework), scene, tmp_path, LIMITS, NeverCancelled()).report
    assert report.end_reason is reason, report
    assert report.detail.startswith(said)


def test_a_command_over_its_limit_does_not_hold_it_up(stage: TrialStage, framework: QwenCode, tmp_path: Path) -> None:
    hasty = LIMITS.model_copy(update={"command_timeout_s": 1.0})
    trial = stage.play(FrameworkAgent(framework), "slow", tmp_path, hasty, NeverCancelled())
    assert trial.report.end_reason is EndReason.SUBMITTED, trial.report
    assert trial.report.steps == 2


def test_a_repository_cannot_lead_it_away_from_its_model(
    stage: TrialStage, framework: QwenCode, tmp_path: Path
) -> None:
    """A project's settings go before the user's, but not before those of the system, which are ours."""
    project = {
        "model": {"name": "another", "generationConfig": {"timeout": 1}},
        "privacy": {"usageStatisticsEnabled": True},
    }
    stage.environment.put("/testbed/.qwen/settings.json", json.dumps(project).encode())
    stage.environment.put("/testbed/.env", b"OPENAI_BASE_URL=http://127.0.0.1:9/v1\nOPENAI_API_KEY=another\n")
    report = stage.play(FrameworkAgent(framework), "words", tmp_path, LIMITS, NeverCancelled()).report
    assert report.end_reason is EndReason.SUBMITTED, report


@pytest.mark.parametrize("more", ["", "x" * 300_000], ids=["short", "longer than an argument may be"])
def test_the_tasks_text_arrives_as_it_is(stage: TrialStage, framework: QwenCode, tmp_path: Path, more: str) -> None:
    text = f"--mend it: 'quotes', $(no command), \\ and ümläute.\n{more}"
    job = replace(stage.job("quick", tmp_path, LIMITS), description=text)
    report = FrameworkAgent(framework).run(job, stage.environment, NeverCancelled())
    assert report.end_reason is EndReason.SUBMITTED, report
    assert report.files is not None
    (session,) = (report.files / "qwen" / "projects").rglob("*.jsonl")
    said = [line["message"]["parts"] for line in lines(session) if line["type"] == "user"]  # type: ignore[index]
    assert any(part.get("text", "").strip() == text.strip() for parts in said for part in parts)
