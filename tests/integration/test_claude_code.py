"""Claude Code itself, in a container without a network, against a scripted model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.agents.claude_code.adapter import ClaudeCode
from app.agents.framework import FrameworkBundle
from app.agents.installation import Installer
from app.agents.running import FrameworkAgent
from app.agents.trial import KEY, NeverCancelled, TrialStage
from app.models.endings import EndReason
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
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted_engine(tmp_path_factory.mktemp("scenes"), **SCENES) as url:
        yield url


@pytest.fixture(scope="module")
def framework() -> ClaudeCode:
    made = ClaudeCode(Installer(kept_tools()), call_timeout_s=60, call_attempts=2)
    made.install()
    return made


@pytest.fixture
def bundle(framework: ClaudeCode) -> FrameworkBundle:
    return framework.install()


@pytest.fixture
def stage(settings: Settings, base_image_tag: str, bundle: FrameworkBundle, engine: str) -> Iterator[TrialStage]:
    with container_stage(settings, base_image_tag, bundle, engine) as made:
        yield made


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.startswith("{")]


def test_it_solves_a_task_and_leaves_its_session(stage: TrialStage, framework: ClaudeCode, tmp_path: Path) -> None:
    framework.suits(stage.environment)
    trial = stage.play(FrameworkAgent(framework), "solve", tmp_path, LIMITS, NeverCancelled())
    report = trial.report
    assert report.end_reason is EndReason.SUBMITTED, report
    assert trial.solved
    assert trial.untracked == ()
    assert report.steps == 3
    assert report.usage["prompt_tokens"] > report.usage["completion_tokens"] > 0
    assert report.files is not None
    sessions = list((report.files / "claude" / "projects").rglob("*.jsonl"))
    assert len(sessions) == 1
    assert {"user", "assistant"} <= {line["type"] for line in lines(sessions[0])}


def test_its_commands_run_as_the_tasks_own_and_see_nothing_of_it(
    stage: TrialStage, framework: ClaudeCode, tmp_path: Path
) -> None:
    trial = stage.play(FrameworkAgent(framework), "look", tmp_path, LIMITS, NeverCancelled())
    assert trial.report.end_reason is EndReason.SUBMITTED, trial.report
    seen = stage.environment.get(f"/testbed/{SEEN}").decode()
    home = stage.environment.run("echo $HOME", timeout_s=20).stdout.decode().strip()
    assert f"HOME={home}\n" in seen
    for foreign in (KEY, "ANTHROPIC", "API_TIMEOUT_MS", "IS_SANDBOX"):
        assert foreign not in seen
    left = stage.environment.run(f"ls -A {home} | grep -i claude", timeout_s=20).text()
    assert left == "", "its state belongs into a folder of its own"


def test_it_takes_its_arguments(stage: TrialStage, framework: ClaudeCode, tmp_path: Path) -> None:
    arguments = {"append_system_prompt": "--Be brief.\nAlways.", "max_thinking_tokens": "0"}
    job = replace(stage.job("quick", tmp_path, LIMITS), arguments=arguments)
    report = FrameworkAgent(framework).run(job, stage.environment, NeverCancelled())
    assert report.end_reason is EndReason.SUBMITTED, report


@pytest.mark.parametrize(
    ("scene", "reason", "said"),
    [
        ("words", EndReason.SUBMITTED, ""),
        ("endless", EndReason.STEP_LIMIT, "max_turns"),
        ("refused", EndReason.MODEL_ERROR, "api_error"),
        ("broken", EndReason.MODEL_ERROR, "api_error"),
        ("too-long", EndReason.CONTEXT_EXHAUSTED, "prompt_too_long"),
    ],
)
def test_endings_by_name(
    stage: TrialStage, framework: ClaudeCode, tmp_path: Path, scene: str, reason: EndReason, said: str
) -> None:
    report = stage.play(FrameworkAgent(framework), scene, tmp_path, LIMITS, NeverCancelled()).report
    assert report.end_reason is reason, report
    assert report.detail.startswith(said)


def test_a_command_over_its_limit_does_not_hold_it_up(stage: TrialStage, framework: ClaudeCode, tmp_path: Path) -> None:
    hasty = LIMITS.model_copy(update={"command_timeout_s": 1.0})
    trial = stage.play(FrameworkAgent(framework), "slow", tmp_path, hasty, NeverCancelled())
    assert trial.report.end_reason is EndReason.SUBMITTED, trial.report
    assert trial.report.steps == 2


def test_a_repository_cannot_lead_it_away_from_its_model(
    stage: TrialStage, framework: ClaudeCode, tmp_path: Path
) -> None:
    """A project's settings go before the process's variables, but not before the settings that we name."""
    project = {"env": {"ANTHROPIC_BASE_URL": "http://127.0.0.1:9", "CLAUDE_CODE_MAX_RETRIES": "0"}}
    stage.environment.put("/testbed/.claude/settings.json", json.dumps(project).encode())
    report = stage.play(FrameworkAgent(framework), "words", tmp_path, LIMITS, NeverCancelled()).report
    assert report.end_reason is EndReason.SUBMITTED, report


@pytest.mark.parametrize("more", ["", "x" * 300_000], ids=["short", "longer than an argument may be"])
def test_the_tasks_text_arrives_as_it_is(stage: TrialStage, framework: ClaudeCode, tmp_path: Path, more: str) -> None:
    text = f"--mend it: 'quotes', $(no command), \\ and ümläute.\n{more}"
    job = replace(stage.job("quick", tmp_path, LIMITS), description=text)
    report = FrameworkAgent(framework).run(job, stage.environment, NeverCancelled())
    assert report.end_reason is EndReason.SUBMITTED, report
    assert report.files is not None
    (session,) = (report.files / "claude" / "projects").rglob("*.jsonl")
    said = [line["message"]["content"] for line in lines(session) if line["type"] == "user"]  # type: ignore[index]
    assert text.strip() in [str(words).strip() for words in said]
