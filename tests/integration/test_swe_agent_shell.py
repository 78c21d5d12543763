"""The shell that SWE-agent works in (swe-rex, the real one), started as our adapter has it started, in a container."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from app.agents.base import AgentJob, ModelEndpoint
from app.agents.framework import FrameworkBundle, FrameworkPaths
from app.agents.installation import Installer
from app.agents.swe_agent.adapter import SweAgent
from app.agents.trial import KEY, TrialStage
from app.models.spec import Limits
from app.settings import Settings
from tests.integration.inside_ground import container_stage, kept_tools, settings

__all__ = ["settings"]

pytestmark = [pytest.mark.agents, pytest.mark.docker]

LOCK = Path(__file__).parents[1] / "stand_ins" / "swe_rex" / "requirements.lock"
HOME = "/var/tmp/home-of-it"
SLOW_START = b"sleep 2\nexport FROM_THE_USER=yes PS1='$ '\n"
PROGRAM = """\
import asyncio, json, sys
from swerex.deployment.local import LocalDeployment
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest

async def main():
    deployment = LocalDeployment()
    await deployment.start()
    runtime = deployment.runtime
    await runtime.create_session(CreateBashSessionRequest(startup_source=["/root/.bashrc"]))
    told = []
    for command in json.load(sys.stdin):
        seen = await runtime.run_in_session(BashAction(command=command, timeout=25, check="silent"))
        told.append([seen.exit_code, seen.output])
    await deployment.stop()
    print("TOLD", json.dumps(told))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def bundle() -> FrameworkBundle:
    return Installer(kept_tools()).python("swe-rex", LOCK, first_use=("-c", "import swerex.deployment.local"))


@pytest.fixture
def stage(settings: Settings, base_image_tag: str, bundle: FrameworkBundle) -> Iterator[TrialStage]:
    with container_stage(settings, base_image_tag, bundle, "http://127.0.0.1:1/v1") as made:
        yield made


def test_its_shell_starts_however_long_the_users_own_file_takes(
    stage: TrialStage, bundle: FrameworkBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = SweAgent(Installer(tmp_path), "somewhere")
    monkeypatch.setattr(adapter, "install", lambda: bundle)
    job = AgentJob("t", "a task", "/testbed", Limits(), None, None, None, tmp_path)
    tool = stage.tools_inside[bundle.name]
    command = adapter.command(
        job, FrameworkPaths(tool, HOME, "/testbed", ModelEndpoint("http://m/v1", "m", SecretStr(KEY)))
    )
    shell = stage.environment
    shell.put(f"{HOME}/.bashrc", command.files[".bashrc"])
    shell.put(f"{HOME}/program.py", PROGRAM.encode())
    shell.put("/root/.bashrc", SLOW_START)

    commands = ["export LANG=C.UTF-8", "cd /testbed", "env", "sleep 2; echo slept; false", "ls", "pwd"]
    done = shell.run(
        f"exec {tool}/bin/python3 {HOME}/program.py",
        env=command.env,
        timeout_s=120,
        stdin=json.dumps(commands).encode(),
    )
    assert done.ok, done.text()[-2000:]
    [told] = [json.loads(line[5:]) for line in done.stdout.decode().splitlines() if line.startswith("TOLD ")]
    assert [code for code, _ in told] == [0, 0, 0, 1, 0, 0]
    assert [told[place][1].strip() for place in (3, 4, 5)] == ["slept", "cart.py", "/testbed"]
    variables = told[2][1]
    assert "FROM_THE_USER=yes" in variables
    assert "HOME=/root" in variables
    for foreign in (KEY, "OPENAI", "LITELLM", "SWE_AGENT"):
        assert foreign not in variables
