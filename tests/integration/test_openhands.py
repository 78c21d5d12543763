"""OpenHands itself, from its bundle, in a container without Python; its endings are in the agents' contract suite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.agents.installation import Installer
from app.agents.openhands.adapter import OpenHands
from app.models.spec import Limits
from megaflow.contract.agents.trial import TrialStage
from tests.integration.inside_fixture import ENV_SCENE, SEEN, engine, kept_tools, look_inside, settings, stage

__all__ = ["engine", "settings", "stage"]

pytestmark = [pytest.mark.agents, pytest.mark.docker, pytest.mark.extra, pytest.mark.timeout(900)]

LIMITS = Limits(agent_timeout_s=600, command_timeout_s=60, max_steps=10)
SCENES = {
    "look": ENV_SCENE,
}


@pytest.fixture(scope="module")
def framework() -> OpenHands:
    made = OpenHands(Installer(kept_tools()), call_timeout_s=120, call_attempts=2)
    made.install()
    return made


def test_its_commands_run_as_the_tasks_own_and_see_nothing_of_it(
    stage: TrialStage, framework: OpenHands, tmp_path: Path
) -> None:
    trial = look_inside(stage, framework, tmp_path, LIMITS, "OPENAI", "LITELLM", "LD_LIBRARY_PATH", "megaflow")
    report = trial.report
    assert report.steps == 2
    assert trial.untracked == (SEEN,)
    assert b"AI_AGENT=openhands" in stage.environment.get(f"/testbed/{SEEN}"), "it says itself who it is"
    assert stage.environment.run("ls -A $HOME", timeout_s=20).text().count(".openhands") == 0

    assert report.files is not None
    told = json.loads((report.files / "result.json").read_text())
    assert told["status"] == "finished"
    events = [file.read_text() for file in report.files.glob("conversation/*/events/event-*.json")]
    assert len(events) > 3
    assert not [event for event in events if "[?2004" in event], "marks of a terminal"
