"""The agent that attacks its grading. Only attacks on a repository are run here: the others would harm this host."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

import pytest

from app.agents.attacks import ATTACKS, TOGETHER, AttackKind
from app.agents.catalogue import AGENTS
from app.agents.cheat import CheatAgent
from app.agents.patch import take_patch
from app.errors import SpecInvalid
from app.grading import protected
from app.host import layer_files
from app.models.endings import EndReason
from app.models.spec import AgentTask, EnvironmentKind, EnvironmentSpec, Mode, TestsGoal
from app.submission import specs_for
from megaflow.contract.agents.trial import NeverCancelled
from tests.unit.folder_shell import FolderShell, committed
from tests.unit.frameworks import a_job

REPOSITORY = [one.name for one in ATTACKS.values() if one.kind is AttackKind.REPOSITORY]


@pytest.fixture
def shell(tmp_path: Path) -> FolderShell:
    shell = FolderShell(tmp_path / "environment")
    files = {"shop/__init__.py": "x = 1\n", "tests/test_shop.py": "def test_x():\n    assert False\n", "tox.ini": ""}
    builds = dict.fromkeys(("package.json", "Makefile", "go.mod", "Cargo.toml", "pom.xml", "Gemfile"), "\n")
    committed(shell.path("/testbed"), files | builds)
    return shell


@pytest.mark.parametrize("attack", ATTACKS)
def test_every_attack_is_a_shell_script_that_parses(attack: str) -> None:
    done = subprocess.run(["sh", "-n"], input=ATTACKS[attack].script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("attack", [name for name in REPOSITORY if name != "deleted-repository"])
def test_an_attack_on_a_repository_travels_in_the_patch(attack: str, shell: FolderShell, tmp_path: Path) -> None:
    report = CheatAgent().run(a_job(tmp_path, arguments={"attack": attack}), shell, NeverCancelled())
    assert (report.end_reason, report.steps) == (EndReason.SUBMITTED, 1)
    assert report.log is not None
    assert f"{attack}: exit code 0" in report.log.read_text()
    patch = take_patch(shell, "/testbed", None)
    assert patch is not None
    assert patch.startswith(b"diff --git")


def test_a_working_folder_without_a_repository_is_attacked_too(tmp_path: Path) -> None:
    shell = FolderShell(tmp_path / "environment")
    CheatAgent().run(a_job(tmp_path, arguments={"attack": "shadow-pytest"}), shell, NeverCancelled())
    assert shell.path("/testbed/pytest.py").is_file()


def test_what_would_hide_other_attacks_is_made_only_when_it_is_named() -> None:
    together = [ATTACKS[name] for name in TOGETHER]
    assert not any(one.alone for one in together)
    assert {one.kind for one in together} == set(AttackKind)
    assert ATTACKS["deleted-tests"].alone


def test_what_is_made_together_leaves_no_file_that_would_make_all_suspect(shell: FolderShell, tmp_path: Path) -> None:
    for attack in set(TOGETHER) & set(REPOSITORY):
        CheatAgent().run(a_job(tmp_path, arguments={"attack": attack}), shell, NeverCancelled())
    assert shell.path("/testbed/conftest.py").is_file()
    upper = shell.path("/testbed").parent
    assert layer_files.put_back(upper, (), partial(protected.decide, workdir="/testbed"))[1] == ()


def test_it_is_never_let_loose_on_a_host_and_its_attack_is_checked_when_submitted() -> None:
    goal = TestsGoal(base_commit="HEAD", test_command="pytest", fail_to_pass=("t.py::t",), pass_to_pass=())
    task = AgentTask(name="a", description="d", environment=EnvironmentSpec(image="i:1"), goal=goal)
    local = task.model_copy(
        update={"environment": EnvironmentSpec(image="i:1", kind=EnvironmentKind.LOCAL)},
    )
    made = specs_for(
        [task], agent="cheat", mode=Mode.AUTO, model=None, agents=AGENTS, agent_args={"attack": "ini-plugin"}
    )
    assert made[0].agent_args == {"attack": "ini-plugin"}
    with pytest.raises(SpecInvalid, match="expected a container for agent 'cheat'"):
        specs_for([local], agent="cheat", mode=Mode.AUTO, model=None, agents=AGENTS)
    with pytest.raises(SpecInvalid, match="expected one of conftest-root"):
        specs_for([task], agent="cheat", mode=Mode.AUTO, model=None, agents=AGENTS, agent_args={"attack": "other"})
