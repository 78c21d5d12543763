"""The demo dataset on hosts that share nothing but the network; hosts that die, fall silent, come back, leave."""

from __future__ import annotations

import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from dotenv import dotenv_values

from app.evaluation.submission import Submission, run_of
from app.ledger import connections, hosts, instances
from app.ledger.instances import InstanceDemand
from app.models.instance import InstanceMode, InstanceRequest
from app.models.spec import EnvironmentKind, Mode
from tests.cluster.system import Cluster, Host, cluster, images_of, wait_until
from tests.services import short_folder

pytestmark = [pytest.mark.extra, pytest.mark.alone, pytest.mark.timeout(600)]

KILLED_S, SILENT_S = 5.0, 45.0
"""Promised: within these, the attempts of a host that was killed, or that fell silent, run elsewhere."""
SLOTS = {"host0": 3, "host1": 3}

Datasets = Callable[[int], Path]


@pytest.fixture(scope="module")
def spread() -> Iterator[Cluster]:
    """Two hosts that have joined, beside the head, and one that may."""
    with cluster(3, ephemeral_idle_s=5.0) as found:
        with ThreadPoolExecutor() as threads:
            said = list(threads.map(lambda host: host.join(found.head, "--slots", "3"), found.hosts[:2]))
        assert all("takes tasks" in one for one in said)
        yield found


@pytest.fixture
def whole(spread: Cluster) -> Cluster:
    """Both hosts take tasks, whatever the test before has done."""
    for host in spread.hosts[:2]:
        spread.network.plug(host.machine)
        if not host.machine.processes():
            assert host.megaflow("up", "--no-install").returncode == 0
    wait_until(lambda: SLOTS.items() <= spread.slots().items(), "both hosts are ready", 90)
    return spread


@pytest.fixture(scope="module")
def datasets() -> Iterator[Datasets]:
    """Makes a dataset of one task that takes so many seconds."""
    files = {
        "instruction.md": "Sleep.\n",
        "task.toml": 'schema_version = "1.0"\n[environment]\nworkdir = "/app"\nallow_internet = false\n',
        "environment/setup.sh": '#!/bin/sh\nmkdir -p "${WORKDIR:-/app}"\n',
        "environment/Dockerfile": "FROM megaflow/base:bookworm\nWORKDIR /app\n",
        "solution/solve.sh": "#!/bin/sh\nexec sleep SECONDS\n",
        "tests/test.sh": "#!/bin/sh\nlogs=${LOGS_DIR:-/logs}/verifier\nmkdir -p $logs\necho 1 >$logs/reward.txt\n",
    }
    with short_folder() as folder:

        def sleeping(seconds: int) -> Path:
            for name, text in files.items():
                file = folder / str(seconds) / "sleeper" / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text.replace("SECONDS", str(seconds)))
            return folder / str(seconds)

        yield sleeping


def _submit(
    whole: Cluster,
    dataset: Path | str,
    count: int,
    environment: EnvironmentKind = EnvironmentKind.LOCAL,
) -> UUID:
    chosen = Submission(
        dataset=str(dataset),
        agent="oracle",
        mode=Mode.PERSISTENT,
        environment=environment,
        replicas=count,
    )
    return whole.flow.accept(run_of(chosen, whole.flow.settings, whole.flow.database)).id


def _attempts(whole: Cluster, run_id: UUID) -> list[tuple[UUID, int, str, str]]:
    """Task, number, state and host of each attempt; those on instances of their own are at the head."""
    with whole.flow.database.begin() as connection:
        rows = connection.exec_driver_sql(
            "SELECT a.task_id, a.number, a.state, coalesce(i.host, 'head') FROM attempts a"
            " JOIN tasks t ON t.id = a.task_id LEFT JOIN instances i ON i.id = a.instance_id WHERE t.run_id = %s",
            (str(run_id),),
        )
        return [(row[0], row[1], row[2], row[3]) for row in rows]


def _running(whole: Cluster, run_id: UUID, host: Host) -> set[UUID]:
    return {task for task, _, state, where in _attempts(whole, run_id) if state == "running" and where == host.name}


def _on_both(whole: Cluster, folder: Path) -> UUID:
    """A run with attempts that run on both hosts."""
    run_id = _submit(whole, folder, 4)
    wait_until(lambda: all(_running(whole, run_id, host) for host in whole.hosts[:2]), "attempts run on both hosts")
    return run_id


def _run_elsewhere(whole: Cluster, run_id: UUID, tasks: set[UUID], gone: Host) -> bool:
    """Whether another attempt of each of the tasks runs, or has run, on another host."""
    found = {
        task
        for task, number, state, where in _attempts(whole, run_id)
        if number > 1 and where != gone.name and state in ("running", "grading", "finished")
    }
    return tasks <= found


def _standing(whole: Cluster, run_id: UUID, *, but: str = "", on: str = "%") -> list[str]:
    """A run's environments that are on record as standing, on some hosts. Those of other runs may be kept for reuse."""
    with whole.flow.database.begin() as connection:
        found = connection.exec_driver_sql(
            "SELECT c.kind || ' ' || c.engine_id || ' on ' || coalesce(i.host, 'head') || ', ' || i.state"
            " FROM created_resources c LEFT JOIN instances i ON i.id = c.instance_id"
            " WHERE c.run_id = %s AND c.destroyed_at IS NULL AND coalesce(i.host, 'head') LIKE %s"
            " AND coalesce(i.host, 'head') <> %s",
            (str(run_id), on, but),
        )
        return list(found.scalars())


def _await_none_standing(whole: Cluster, run_id: UUID, what: str, **where: str) -> None:
    """Raises: AssertionError: it names what stands."""
    try:
        wait_until(lambda: not _standing(whole, run_id, **where), what)
    except AssertionError as error:
        raise AssertionError(f"{error}: {_standing(whole, run_id, **where)}") from None


def _all_solved(whole: Cluster, run_id: UUID, *, timeout_s: float = 150) -> None:
    found = whole.flow.run(run_id).results(timeout=timeout_s)
    assert {result.name: result.failure for result in found if result.reward != 1.0} == {}


def test_a_host_has_accounts_of_its_own_in_files_of_its_own(whole: Cluster) -> None:
    homes = [host.home for host in whole.hosts[:2]]
    files = [home / name for home in homes for name in ("host.env", "host.json")]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    texts = [(home / "host.env").read_text() for home in homes]
    assert all("AWS_SECRET_ACCESS_KEY='for-hosts-alone'" in text for text in texts)
    assert not any(secret in text for text in texts for secret in ("of-the-head", "db-word", "broker-word"))
    accounts = [host.account for host in hosts.joined(whole.flow.database)]
    assert [sum(account in text for text in texts) for account in accounts] == [1, 1]
    listed = whole.hosts[0].machine.command("ls", str(whole.head.home))
    assert subprocess.run(listed, capture_output=True, check=True).stdout == b"", "it does not see the head's files"


def test_the_demo_dataset_is_solved_on_three_hosts_in_containers(whole: Cluster) -> None:
    third = whole.hosts[2]
    assert "takes tasks" in third.join(whole.head, "--slots", "3")
    with images_of(whole.flow.settings):
        run_id = _submit(whole, "demo", 1, EnvironmentKind.DOCKER)  # services, too, on the one engine of all hosts
        _all_solved(whole, run_id, timeout_s=280)
    where = {host for _, _, state, host in _attempts(whole, run_id) if state == "finished"}
    assert {"host0", "host1", "host2"} <= where
    left = third.megaflow("worker", "leave")
    assert left.returncode == 0
    assert "not revoked, since all hosts have the same: AWS_ACCESS_KEY_ID" in left.stderr


def test_what_a_killed_host_ran_runs_elsewhere_within_seconds(whole: Cluster, datasets: Datasets) -> None:
    dying = whole.hosts[0]
    wait_until(lambda: connections.locked(whole.flow.database)[1], "the server is no longer a young one")
    run_id = _on_both(whole, datasets(20))
    time.sleep(4)  # the look that finds a connection comes before the one that misses it
    lost = _running(whole, run_id, dying)
    assert dying.machine.kill() > 2
    took_s = wait_until(lambda: _run_elsewhere(whole, run_id, lost, dying), "they run elsewhere", KILLED_S)
    print(f"killed: {took_s:.1f} s")
    _all_solved(whole, run_id)
    _await_none_standing(whole, run_id, "nothing is left on the survivors", but=dying.name)
    assert dying.megaflow("up", "--no-install").returncode == 0
    _await_none_standing(whole, run_id, "the host that is back cleans itself")


def test_what_a_silent_host_ran_runs_elsewhere_and_it_cleans_itself_when_it_is_back(
    whole: Cluster, datasets: Datasets
) -> None:
    silent = whole.hosts[0]
    run_id = _on_both(whole, datasets(50))
    lost = _running(whole, run_id, silent)
    whole.network.unplug(silent.machine)
    took_s = wait_until(lambda: _run_elsewhere(whole, run_id, lost, silent), "they run elsewhere", SILENT_S)
    print(f"silent: {took_s:.1f} s")
    at_work = [one.pid for one in silent.machine.processes() if one.name() == "sleep"]
    assert at_work == [], "it has stopped its own work before its leases lapsed"
    whole.network.plug(silent.machine)
    _await_none_standing(whole, run_id, "the host that is back cleans itself", on=silent.name)
    wait_until(lambda: SLOTS.items() <= whole.slots().items(), "it takes tasks again", 90)
    _all_solved(whole, run_id)
    _await_none_standing(whole, run_id, "nothing is left on the survivors")


def test_redis_forgets_its_users_and_hosts_go_on(whole: Cluster, datasets: Datasets) -> None:
    whole.head.stop_redis()
    whole.head.start_redis()
    run_id = _submit(whole, datasets(1), 6)
    _all_solved(whole, run_id)
    assert {where for _, _, _, where in _attempts(whole, run_id)} & SLOTS.keys()


def test_a_machine_that_is_one_instance_leaves_with_it(whole: Cluster) -> None:
    database, machine = whole.flow.database, whole.hosts[2]
    with database.begin() as connection:
        (one,) = instances.request(
            connection, InstanceDemand("static", InstanceMode.EPHEMERAL, "standard", 1, 1, 600.0)
        )
    instances.launched(database, {one: "a machine"})
    request = InstanceRequest(instance_id=one, mode=InstanceMode.EPHEMERAL).model_dump_json()
    token = hosts.invite(database, name="cloud", instance_id=one)
    url = whole.flow.settings.web_base()
    done = machine.megaflow("worker", "join", url, "--token", token, "--plain-http", "--instance", request)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: "cloud" not in {host.name for host in hosts.joined(database)}, "its accounts are gone")
    machine.forget()


def test_a_host_behind_slow_links_takes_its_share(whole: Cluster, datasets: Datasets) -> None:
    far = whole.hosts[2]
    assert "takes tasks" in far.join(whole.head, "--slots", "3", url=whole.head.slow_links(0.1))
    run_id = _submit(whole, datasets(5), 9)
    _all_solved(whole, run_id)
    assert far.name in {where for _, _, state, where in _attempts(whole, run_id) if state == "finished"}
    far.machine.kill()
    far.forget()
    whole.head.megaflow("worker", "leave", far.name, "--wait", "0")
    assert far.name not in {host.name for host in hosts.joined(whole.flow.database)}


def test_a_host_whose_credentials_are_taken_stops_and_its_attempts_run_elsewhere(
    whole: Cluster, datasets: Datasets
) -> None:
    removed = whole.hosts[0]
    run_id = _on_both(whole, datasets(50))
    lost = _running(whole, run_id, removed)
    whole.head.megaflow("worker", "leave", removed.name, "--wait", "0")
    wait_until(lambda: _run_elsewhere(whole, run_id, lost, removed), "they run elsewhere", SILENT_S)
    wait_until(lambda: not [one for one in removed.machine.processes() if one.name() == "sleep"], "it stops its work")
    done = removed.megaflow("worker", "leave")
    assert done.returncode == 0, done.stderr
    assert "removed this host already" in done.stderr
    assert removed.machine.processes() == []
    assert "takes tasks" in removed.join(whole.head, "--slots", "3")
    _all_solved(whole, run_id)


def test_a_host_that_leaves_finishes_what_it_runs_and_loses_its_accounts(whole: Cluster, datasets: Datasets) -> None:
    leaving = whole.hosts[1]
    run_id = _on_both(whole, datasets(8))
    url = dotenv_values(leaving.home / "host.env", interpolate=False)["MEGAFLOW_DATABASE_URL"]
    assert url is not None
    done = leaving.megaflow("worker", "leave")
    assert done.returncode == 0, done.stderr
    assert leaving.machine.processes() == []
    assert {number for _, number, _, _ in _attempts(whole, run_id)} == {1}, "none had to begin again"
    _all_solved(whole, run_id)
    assert leaving.name not in {host.name for host in hosts.joined(whole.flow.database)}
    assert not (leaving.home / "host.env").exists()
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(url.replace(f"{leaving.home}/certificates/authority-1.pem", f"{whole.head.certificates}"))
