"""OpenHands itself, from its bundle, in a container without Python; its endings are in the agents' contract suite."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.agents.installation import Installer
from app.agents.openhands.adapter import OpenHands
from app.agents.running import FrameworkAgent
from app.agents.trial import KEY, NeverCancelled, TrialStage
from app.models.endings import EndReason
from app.models.spec import Limits
from app.settings import Settings
from tests.integration.inside_ground import ENV_SCENE, SEEN, container_stage, kept_tools, scripted_engine, settings

__all__ = ["settings"]

pytestmark = [pytest.mark.agents, pytest.mark.docker, pytest.mark.timeout(900)]

LIMITS = Limits(agent_timeout_s=600, command_timeout_s=60, max_steps=10)
SCENES = {
    "look": ENV_SCENE,
    "same": "[" + ", ".join(["{thought: again, command: ls}"] * 9) + "]",
    "words": "[{thought: It is fine as it is.}]",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted_engine(tmp_path_factory.mktemp("scenes"), **SCENES) as url:
        yield url


@pytest.fixture(scope="module")
def framework() -> OpenHands:
    made = OpenHands(Installer(kept_tools()), call_timeout_s=120, call_attempts=2)
    made.install()
    return made


@pytest.fixture
def stage(settings: Settings, base_image_tag: str, framework: OpenHands, engine: str) -> Iterator[TrialStage]:
    with container_stage(settings, base_image_tag, framework.install(), engine) as made:
        yield made


def test_its_commands_run_as_the_tasks_own_and_see_nothing_of_it(
    stage: TrialStage, framework: OpenHands, tmp_path: Path
) -> None:
    trial = stage.play(FrameworkAgent(framework), "look", tmp_path, LIMITS, NeverCancelled())
    report = trial.report
    assert report.end_reason is EndReason.SUBMITTED, report
    assert report.steps == 2
    assert report.usage["prompt_tokens"] > report.usage["completion_tokens"] > 0
    assert trial.untracked == (SEEN,)

    seen = stage.environment.get(f"/testbed/{SEEN}").decode()
    home = stage.environment.run("echo $HOME", timeout_s=20).stdout.decode().strip()
    assert f"HOME={home}\n" in seen
    assert "AI_AGENT=openhands" in seen, "it says itself who it is"
    for foreign in (KEY, "OPENAI", "LITELLM", "LD_LIBRARY_PATH", "megaflow"):
        assert foreign not in seen
    assert stage.environment.run("ls -A $HOME", timeout_s=20).text().count(".openhands") == 0

    assert report.files is not None
    told = json.loads((report.files / "result.json").read_text())
    assert told["status"] == "finished"
    events = [file.read_text() for file in report.files.glob("conversation/*/events/event-*.json")]
    assert len(events) > 3
    assert not [event for event in events if "[?2004" in event], "marks of a terminal"
    kept = [file for file in tmp_path.rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()]
    assert kept == []


def test_going_round_in_circles_ends_it(stage: TrialStage, framework: OpenHands, tmp_path: Path) -> None:
    report = stage.play(FrameworkAgent(framework), "same", tmp_path, LIMITS, NeverCancelled()).report
    assert (report.end_reason, report.detail) == (EndReason.AGENT_ERROR, "stuck")


def test_words_alone_are_its_end(stage: TrialStage, framework: OpenHands, tmp_path: Path) -> None:
    report = stage.play(FrameworkAgent(framework), "words", tmp_path, LIMITS, NeverCancelled()).report
    assert (report.end_reason, report.steps) == (EndReason.SUBMITTED, 1), report
