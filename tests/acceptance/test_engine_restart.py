"""The container engine is restarted amid tasks: attempts are repeated, none is scored for it.

One whose environment needs no engine goes on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from app.environments.runtimes.compose.resources import PROJECT
from app.environments.runtimes.oci import available
from app.host.engine import ROLE
from app.settings import Settings
from app.stack import engine
from app.stack.engine import connected
from app.stack.processes import has_ended
from tests.acceptance.conftest import QUICK, System, bare_folder, up
from tests.integration.test_stack_engine import can_start, private
from tests.services import missing, settings_in
from tests.waiting import eventually

pytestmark = [
    pytest.mark.docker,
    pytest.mark.extra,
    pytest.mark.timeout(600),
    can_start,
]

SOLVE = "sleep 8; echo done > answer"
PROJECT_FILE = """
services:
  main: {depends_on: [beside]}
  beside: {image: BASE, command: [sleep, "600"], volumes: ["kept:/kept"]}
volumes: {kept: }
"""


@pytest.fixture(scope="module")
def own_engine(base_image_tag: str) -> Iterator[System]:
    """A system whose containers all stand on an engine of its own."""
    with bare_folder() as folder:
        settings = settings_in(
            folder,
            docker_url=f"unix://{folder}/d.sock",
            container_runtime="docker",
            base_image=base_image_tag,
            **QUICK,
        )
        report = engine.ensure_engine(settings, may_install=False, dockerd=private(folder))
        assert report.available, report.why
        try:
            _give_image(settings, base_image_tag)
            with up(settings) as flow:
                yield System(settings, flow)
        finally:
            engine.stop_engine(settings)


def _give_image(settings: Settings, tag: str) -> None:
    """The machine's engine has it already."""
    with connected(Settings(home=settings.home)) as mine, connected(settings) as own:
        own.images.load(b"".join(mine.images.get(tag).save(named=True)))


def _environments(settings: Settings) -> list[str]:
    with connected(settings) as client:
        labels = [f"megaflow={settings.installation}", f"{ROLE}=environment"]
        found = client.api.containers(all=True, filters={"label": labels})
        return [str(one["Names"][0]).lstrip("/") for one in found]


def _kill(settings: Settings) -> None:
    """End the engine without a word: its containers do not end with it, and are unknown to the next one for a while."""
    pid = int(private(settings.home.parent).pidfile.read_text())
    dying = psutil.Process(pid)
    dying.kill()
    eventually(lambda: has_ended(dying), within_s=10)  # the client forgets to close a socket on which it dies
    assert engine.version(settings) is None


def _stop(settings: Settings) -> None:
    assert engine.stop_engine(settings)


def _start_again(settings: Settings) -> None:
    report = engine.ensure_engine(settings, may_install=False, dockerd=private(settings.home.parent))
    assert report.available, report.why


@pytest.mark.parametrize("mode", ["ephemeral", "persistent"])
@pytest.mark.parametrize("end", [_stop, _kill], ids=["stopped", "killed"])
def test_tasks_whose_engine_goes_away_are_done_again(
    own_engine: System, task_folder: Callable[..., Path], mode: str, end: Callable[[Settings], None]
) -> None:
    settings = own_engine.settings
    folder = task_folder(f"slow-{mode}-{end.__name__}", solve=SOLVE)
    submitted = own_engine.json(
        "submit", str(folder), "--agent", "oracle", "--mode", mode, "--replicas", "2", timeout_s=60
    )
    run_id = submitted["run_id"]
    eventually(lambda: len(_running(own_engine, run_id)) == 2, within_s=120)
    end(settings)
    _start_again(settings)
    results = own_engine.results(run_id, 240)
    assert [result.reward for result in results] == [1.0, 1.0]
    for result in results:
        *lost, last = result.attempts
        assert last.state == "finished"
        assert all(attempt.state != "finished" and attempt.verdict is None for attempt in lost), lost
    assert end is _kill or any(len(result.attempts) > 1 for result in results), "nothing was interrupted"
    # What stands yet is what a standing instance keeps ready for the next task.
    eventually(lambda: not [name for name in _environments(settings) if _of_ended(own_engine, name)], within_s=60)


def test_a_task_of_several_containers_is_done_again_and_nothing_of_the_first_time_stays(
    own_engine: System, task_folder: Callable[..., Path], base_image_tag: str
) -> None:
    settings = own_engine.settings
    solve = "touch /first-time; sleep 8; getent hosts beside && echo done > answer"
    folder = task_folder("slow-several", solve=solve)
    (folder / "environment" / "docker-compose.yaml").write_text(PROJECT_FILE.replace("BASE", base_image_tag))
    submitted = own_engine.json("submit", str(folder), "--agent", "oracle", "--mode", "ephemeral", timeout_s=60)
    eventually(lambda: len(_running(own_engine, submitted["run_id"])) == 1, within_s=120)
    assert {kind for kind, _ in _of_projects(settings)} == {"container", "network", "volume"}
    first = set(_of_projects(settings))
    _kill(settings)
    _start_again(settings)
    (result,) = own_engine.results(submitted["run_id"], 240)
    assert result.reward == 1.0
    *lost, last = result.attempts
    assert lost, "nothing was interrupted"
    assert all(attempt.verdict is None for attempt in lost), lost
    assert last.state == "finished"
    assert not first & set(_of_projects(settings)), "the second time is one of its own"
    eventually(lambda: not _of_projects(settings), within_s=60)


def _of_projects(settings: Settings) -> list[tuple[str, str]]:
    """Kind and id of all that stands on the engine for tasks of several containers."""
    chosen = {"label": [f"megaflow={settings.installation}", PROJECT]}
    with connected(settings) as client:
        return [
            *(("container", str(one["Id"])) for one in client.api.containers(all=True, filters=chosen)),
            *(("network", str(one["Id"])) for one in client.api.networks(filters=chosen)),
            *(("volume", str(one["Name"])) for one in client.api.volumes(filters=chosen)["Volumes"] or ()),
        ]


def test_a_task_that_needs_no_engine_notices_nothing(
    own_engine: System, task_folder: Callable[..., Path], base_image_tag: str
) -> None:
    settings = own_engine.settings
    if (why := available(settings)) is not None:
        missing(f"environments without a daemon: {why}")
    folder = task_folder("engineless", solve=SOLVE)
    task = own_engine.task_of(folder, kind="oci", image=base_image_tag, build=None, workdir="/")
    run = own_engine.flow.enqueue_many([task], agent="oracle", mode="ephemeral", replicas=2)
    eventually(lambda: len(_running(own_engine, str(run.id))) == 2, within_s=120)
    _kill(settings)
    try:
        amid = run.results(timeout=120)
        without = own_engine.flow.enqueue_many([task], agent="oracle", mode="ephemeral").results(timeout=120)
        assert engine.version(settings) is None, "it was away all the time"
    finally:
        _start_again(settings)
    for result in (*amid, *without):
        assert (result.reward, [attempt.state for attempt in result.attempts]) == (1.0, ["finished"])
        (row,) = own_engine.rows("SELECT waits, environment FROM attempts WHERE task_id = :t", t=result.task_id)
        assert (row.environment["kind"], "engine" in row.waits) == ("oci", False)


def _running(system: System, run_id: str) -> list[object]:
    statement = (
        "SELECT a.id FROM attempts a JOIN tasks t ON t.id = a.task_id WHERE t.run_id = :run"
        " AND a.state = 'running' AND a.phases ? 'agent_started'"
    )
    return system.rows(statement, run=run_id)


def _of_ended(system: System, name: str) -> bool:
    """Whether a container is one of an attempt whose instance has ended."""
    attempt = name.removeprefix("megaflow-").rsplit("-", 2)[0]
    if attempt == "ready":
        return False
    statement = (
        "SELECT 1 FROM attempts a JOIN instances i ON i.id = a.instance_id"
        " WHERE a.id = CAST(:attempt AS uuid) AND i.state NOT IN ('ready', 'draining')"
    )
    return bool(system.rows(statement, attempt=attempt))
