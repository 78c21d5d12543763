"""External agents as real programs: what they are given, what they may do, and whatever they do wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from app.agents.base import AgentJob, AgentReport, ModelEndpoint
from app.agents.external import read
from app.agents.external.framework import ExternalFramework
from app.agents.installation import Installer
from app.agents.running import FrameworkAgent
from app.environments.contract import Environment
from app.errors import AgentUnavailable
from app.models.endings import EndReason
from app.models.spec import Limits
from megaflow.contract.agents.fixtures import *  # noqa: F403  an environment, and its provider
from megaflow.contract.agents.trial import NeverCancelled
from tests.contract.agents.example import EXAMPLE

KEY = "sk-of-this-attempt-0123456789"
SUBMITTED = '{"protocol": "megaflow-agent/1", "end_reason": "submitted"}'
Run = Callable[..., AgentReport]

ASK = (EXAMPLE.parent / "agent.py").read_text().partition("def ask_bridge")[2].partition("\n\n\n")[0]
PYTHON = f"import base64, json, os, socket, struct, sys\nJOB = json.load(open(sys.argv[1]))\ndef ask_bridge{ASK}\n"


@pytest.fixture
def run(tmp_path: Path, environment: Environment) -> Run:
    """Lets an adapter of one file work: `run(script, needs_model=…)`, in the language of `program`."""

    def ran(script: str, *, program: str = "sh", limits: Limits | None = None, **keys: object) -> AgentReport:
        agent = FrameworkAgent(made(tmp_path, script, program=program, **keys))
        agent.check()
        return agent.run(job(tmp_path, agent, limits), environment, NeverCancelled())

    return ran


def made(tmp_path: Path, script: str, *, program: str = "sh", **keys: object) -> ExternalFramework:
    bundle = tmp_path / "bundle"
    bundle.mkdir(exist_ok=True)
    (bundle / "run").write_text(script)
    told = {"protocol": "megaflow-agent/1", "name": "mine", "version": "1", "argv": [program, "{tool}/run"]} | keys
    lines = [f"{key} = {json.dumps(value)}" for key, value in told.items()]
    (bundle / "agent.toml").write_text("\n".join(lines))
    return ExternalFramework(read(bundle / "agent.toml"), Installer(tmp_path / "tools"))


def job(tmp_path: Path, agent: FrameworkAgent, limits: Limits | None) -> AgentJob:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    folder = str(agent.framework.install().folder)
    return AgentJob(
        task_name="cart-1",
        description='fix "it"\nand nothing else: ü',
        workdir="/testbed",
        limits=limits or Limits(agent_timeout_s=120, command_timeout_s=30),
        model=ModelEndpoint("http://engine.test/v1", "some-model", SecretStr(KEY)) if agent.needs_model else None,
        solution=None,
        solution_files=None,
        scratch=scratch,
        model_inside_url="http://127.0.0.1:8411/v1",
        arguments={"colour": "blue"},
        tools_inside={"mine": folder},
    )


def result(**told: Any) -> str:
    """A script that writes this result."""
    content = json.dumps({"protocol": "megaflow-agent/1", "end_reason": "submitted"} | told)
    return f"cat > result.json <<'END'\n{content}\nEND\n"


def test_the_job_says_all_that_an_adapter_needs_and_the_key_is_in_its_variable_alone(run: Run) -> None:
    script = f'[ "$MEGAFLOW_MODEL_KEY" = {KEY} ] && [ "$MEGAFLOW_JOB" = "$1" ] && [ "$HOME" = "$PWD" ] && {result()}'
    report = run(script, dialect="messages")
    assert report.end_reason is EndReason.SUBMITTED, report
    assert report.files is not None
    told = json.loads((report.files / "job.json").read_text())
    assert told["protocol"] == "megaflow-agent/1"
    assert told["task"] == {"name": "cart-1", "description": 'fix "it"\nand nothing else: ü', "workdir": "/testbed"}
    assert told["limits"]["command_timeout_s"] == 30
    assert told["model"] == {
        "name": "some-model",
        "dialect": "messages",
        "openai_base_url": "http://engine.test/v1",
        "anthropic_base_url": "http://engine.test",
        "key_variable": "MEGAFLOW_MODEL_KEY",
        "call_timeout_s": 480.0,
        "call_attempts": 3,
    }
    assert told["bridge"]["protocol"] == "megaflow-bridge/1"
    assert told["arguments"] == {"colour": "blue"}
    assert KEY not in (report.files / "job.json").read_text()


def test_its_result_counts_and_not_its_exit_code(run: Run) -> None:
    report = run(result(end_reason="step_limit", detail="enough", steps=4, usage={"own": 1}) + "echo said; exit 7")
    assert (report.end_reason, report.detail, report.steps) == (EndReason.STEP_LIMIT, "enough", 4)
    assert report.usage == {"own": 1.0}
    assert report.log is not None
    assert "said" in report.log.read_text()


def test_it_acts_over_the_bridge(run: Run, environment: Environment) -> None:
    script = PYTHON + (
        "assert ask_bridge(hello='megaflow-bridge/1')['hello'] == JOB['bridge']['protocol']\n"
        "sent = base64.b64encode(bytes(range(256))).decode()\n"
        "assert ask_bridge(put='/testbed/deep/x.bin', content=sent, mode=0o750) == {'put': '/testbed/deep/x.bin'}\n"
        "assert ask_bridge(get='/testbed/deep/x.bin') == {'content': sent}\n"
        "assert 'FileNotFoundError' in ask_bridge(get='/testbed/absent')['error']\n"
        "said = ask_bridge(command='stat -c %a deep/x.bin; cat; exit 3', stdin=base64.b64encode(b'in').decode())\n"
        "assert (said['exit_code'], said['output']) == (3, '750\\nin'), said\n"
        "assert ask_bridge(command='sleep 60', timeout_s=0.2)['timed_out']\n"
        f"open(JOB['result'], 'w').write({SUBMITTED!r})\n"
    )
    report = run(script, program="python3")
    assert report.end_reason is EndReason.SUBMITTED, report
    assert environment.get("/testbed/deep/x.bin") == bytes(range(256))


def test_inside_it_acts_by_itself(run: Run, environment: Environment) -> None:
    script = 'echo changed > inside.txt; cd "$(dirname "$1")"; ' + result(steps=1)
    report = run(script, placement="inside")
    assert report.end_reason is EndReason.SUBMITTED, report
    assert environment.get("/testbed/inside.txt") == b"changed\n"
    assert environment.run("ls", timeout_s=20).text() == "inside.txt\n", "nothing of its own is there"
    assert report.files is not None
    told = json.loads((report.files / "job.json").read_text())
    assert (told["bridge"], told["model"]["openai_base_url"]) == (None, "http://127.0.0.1:8411/v1")


def test_its_own_installation_decides_whether_it_can_be_had(tmp_path: Path) -> None:
    framework = made(tmp_path, "true", install=["sh", "-c", "echo no such library >&2; exit 1"])
    with pytest.raises(AgentUnavailable, match="no such library"):
        framework.install()


def test_what_it_installs_is_made_once_and_anew_for_another_version(tmp_path: Path) -> None:
    fill = ["sh", "-c", "echo x >> count; cp run $0/run", "{tool}"]
    for version, count in (("1", 1), ("1", 1), ("2", 2)):
        folder = made(tmp_path, "true", install=fill, version=version).install().folder
        assert (folder / "run").is_file()
        assert (tmp_path / "bundle" / "count").read_text() == "x\n" * count
