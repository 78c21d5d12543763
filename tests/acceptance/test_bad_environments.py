"""Environments that cannot be had, as a whole task: one clear end, its class, no attempt in vain, and nothing left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from app.artifacts import open_store
from app.artifacts.bundles import store_bundle
from app.datasets.source import DEMO
from app.environments.listing import listed
from app.errors import SpecInvalid
from app.ledger import accept
from app.ledger.accept import NewRun
from app.models.outcome import TaskResult
from app.models.spec import AgentTask, Compose, Reuse, TaskSpec
from tests.acceptance.conftest import System
from tests.integration.fake_registry import registry as registry
from tests.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

TaskFolder = Callable[..., Path]


def _ended(system: System, run_id: UUID) -> TaskResult:
    """The one task's end, and nothing of it left."""
    (result,) = system.flow.run(run_id).results(timeout=150)
    eventually(lambda: _left(system, run_id) == [], within_s=30)
    return result


def _submitted(system: System, dataset: Path | str, *more: str) -> TaskResult:
    accepted = system.json("submit", str(dataset), "--agent", "nop", "--mode", "persistent", *more)
    return _ended(system, UUID(accepted["run_id"]))


def _left(system: System, run_id: UUID) -> list[str]:
    """What stands of the run on the engine and on this host: containers, networks, volumes, environments, folders."""
    found, _ = listed(system.settings)
    environments = system.settings.home / "environments" / "oci"
    known = {one.id for one in found}
    nobodys = [str(place) for place in environments.glob("*") if place.name not in known]
    attempts = system.rows("SELECT a.id FROM attempts a JOIN tasks t ON t.id = a.task_id WHERE t.run_id = :r", r=run_id)
    names = {f"attempt-{UUID(str(row.id)).hex[-12:]}" for row in attempts}
    scratch = [str(place) for place in (system.settings.home / "scratch").glob("*/*") if place.name in names]
    return [*(one.name for one in found if one.run_id == run_id), *nobodys, *scratch]


def _failed(result: TaskResult, error: str, *, attempts: int) -> str:
    """It ended as not measured, of this class; what was said of it."""
    assert (result.state, result.verdict) == ("failed", None)
    assert [attempt.failure and attempt.failure.error for attempt in result.attempts] == [error] * attempts
    assert result.failure is not None
    assert result.failure.error == error
    return result.failure.message


def _with(folder: Path, toml: str) -> Path:
    """The folder's task with more in its task.toml."""
    file = folder / "task.toml"
    file.write_text(f"{file.read_text()}{toml}")
    return folder


def test_a_set_up_that_fails_twice_ends_the_task_and_says_what_failed(system: System, task_folder: TaskFolder) -> None:
    ours = '[megaflow]\nsetup = ["true", "echo why-it-failed; exit 7"]\n'
    result = _submitted(system, _with(task_folder("bad-set-up"), ours))
    said = _failed(result, "SetupFailed", attempts=2)
    assert result.end_reason == "environment_error"
    assert said == "set-up command 'echo why-it-failed; exit 7': exit code 7: why-it-failed"
    shown = system.megaflow("show", str(result.task_id)[-12:]).stdout
    assert "SetupFailed: set-up command 'echo why-it-failed; exit 7'" in " ".join(shown.split())


def test_an_image_without_a_shell_is_not_tried_again(system: System, task_folder: TaskFolder) -> None:
    folder = task_folder("shell-less", dockerfile="FROM scratch\nCOPY Dockerfile /Dockerfile\n")
    assert "sh" in _failed(_submitted(system, folder), "ImageUnfit", attempts=1)


def test_an_image_that_its_registry_does_not_have_is_tried_once_more(
    system: System, task_folder: TaskFolder, registry: str
) -> None:
    folder = _with(task_folder("nowhere"), f'docker_image = "{registry}/no/such:1"\n')
    assert f"{registry}/no/such:1" in _failed(_submitted(system, folder), "ImageMissing", attempts=2)


# --- A project that asks for the host ---------------------------------------------------------------------------------

GREEDY = "services: {main: {image: a}, db: {image: b, privileged: true, volumes: ['/:/host']}}\n"


@pytest.fixture
def greedy(system: System, task_folder: TaskFolder, tmp_path: Path) -> AgentTask:
    """A task of several containers, made by hand, one of which wants to be root of the host."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "docker-compose.yaml").write_text(GREEDY)
    context = store_bundle(open_store(system.settings.artifacts()), tmp_path / "project")
    task = system.task_of(task_folder("greedy"))
    environment = task.environment.model_copy(update={"build": None, "compose": Compose(context=context)})
    return task.model_copy(update={"environment": environment})


def test_a_project_that_asks_for_the_host_is_refused_before_it_is_accepted(system: System, greedy: AgentTask) -> None:
    before = system.rows("SELECT count(*) AS n FROM runs")
    with pytest.raises(SpecInvalid, match=r"(?s)'greedy': .*services\.db\.privileged.*services\.db\.volumes"):
        system.flow.enqueue(greedy, agent="nop")
    assert system.rows("SELECT count(*) AS n FROM runs") == before


def test_one_that_was_accepted_all_the_same_is_an_invalid_spec_and_nothing_is_made(
    system: System, greedy: AgentTask
) -> None:
    spec = TaskSpec(task=greedy, agent="nop")
    accepted = accept.accept(system.flow.database, NewRun(specs=[spec]), system.settings)
    result = _ended(system, accepted.run_id)
    assert "services.db.privileged" in _failed(result, "SpecInvalid", attempts=1)
    assert result.end_reason == "invalid_spec"


# --- What whoever submits says ----------------------------------------------------------------------------------------


def test_the_options_of_submit_go_before_what_the_tasks_say(system: System, task_folder: TaskFolder) -> None:
    test = "[ \"$(cat /made)\" = 'own more' ] && echo 1 > $OUT || echo 0 > $OUT"
    folder = _with(task_folder("overridden", test=test), "[megaflow]\nsetup = [\"printf 'own ' > /made\"]\n")
    options = ("--setup", "printf more >> /made", "--network", "model-only", "--reuse", "fresh", "--disk", "256")
    for _ in range(2):
        result = _submitted(system, folder, *options)
        assert result.reward == 1.0
        assert result.attempt is not None
        assert (result.attempt.environment["origin"], result.attempt.environment["network"]) == ("fresh", "model-only")
    asked = system.rows("SELECT body FROM specs WHERE body LIKE '%overridden%' AND body LIKE '%printf more%'")
    assert {json.loads(row.body)["task"]["environment"]["resources"]["disk_bytes"] for row in asked} == {256 << 20}


def test_an_agent_that_changes_nothing_shares_a_read_only_environment_and_is_graded_apart(
    system: System, tmp_path: Path
) -> None:
    row: dict[str, Any] = json.loads((DEMO / "swebench" / "rows.jsonl").read_text().splitlines()[0])
    shutil.copytree(DEMO / "swebench" / row["build_context"], tmp_path / row["build_context"])
    (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"megaflow": {"reuse": Reuse.SHARED_READONLY}}))
    submitted = ("--agent", "nop", "--mode", "persistent", "--replicas", "4", "--wait")
    results = system.json("submit", str(tmp_path / "rows.jsonl"), *submitted)["results"]
    assert [(one["end_reason"], one["verdict"]["reward"]) for one in results] == [("submitted", 0.0)] * 4
    attempts = [one["attempts"][-1] for one in results]
    assert [one["environment"].get("shared") for one in attempts] == [True] * 4
    assert all(one["verdict"]["tests"] for one in results), "the tests ran"
    patches = [part for one in attempts for part in one["artifacts"] if part["kind"] == "patch"]
    assert [part["size_bytes"] for part in patches] == [0] * 4
