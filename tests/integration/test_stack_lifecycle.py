"""`up` and `down` of a real stack: supervisord, its servers, and programs that misbehave."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import docker
import httpx
import psutil
import psycopg
import pytest
import redis as redis_client
from pydantic import SecretStr

from app.errors import InstallationFailed, StackNotRunning
from app.settings import Settings
from app.stack import doctor, engine, flower, leftovers, lifecycle, supervisor
from app.stack.home import MARKER, exclusively
from app.stack.processes import has_ended
from app.stack.programs import Program, StartStage, programs
from tests.services import settings_in
from tests.waiting import eventually

_WAIT = ("-c", "import signal; signal.pause()")


def _servers(settings: Settings) -> tuple[Program, ...]:
    return tuple(program for program in programs(settings) if program.stage is StartStage.SERVERS)


def _servers_and(*more: Program) -> Callable[[Settings], tuple[Program, ...]]:
    return lambda settings: (*_servers(settings), *more)


def _python(name: str, *arguments: str, stage: StartStage = StartStage.WORK) -> Program:
    return Program(name, stage, (sys.executable, *arguments), stop_wait_s=2)


@pytest.fixture
def settings(home_folder: Path) -> Iterator[Settings]:
    chosen = settings_in(home_folder.parent, database_url=None, broker_url=None)
    yield chosen
    lifecycle.down(chosen, print, purge=True, table=_servers)
    assert leftovers.processes(chosen) == []


def _up(settings: Settings, table: Callable[[Settings], tuple[Program, ...]] = _servers) -> lifecycle.StackReport:
    return lifecycle.up(settings, print, may_install=False, base=False, dockerd=_NO_DOCKERD, table=table)


_NO_DOCKERD = engine.Dockerd(url="unix:///nowhere/docker.sock")
"""These tests must not start an engine on this machine."""


def _pid(settings: Settings, name: str) -> int:
    return next(state.pid for state in supervisor.states(settings) if state.name == name)


def test_up_and_down_may_be_repeated_and_only_a_purge_deletes_the_data(settings: Settings) -> None:
    first = _up(settings)
    assert set(first.started) == {"postgres", "redis"}
    second = _up(settings)
    assert (second.started, second.programs, second.restart_needed) == ((), first.programs, False)
    assert _up(settings.model_copy(update={"lease_s": 99.0})).restart_needed
    elsewhere = settings.model_copy(update={"database_url": SecretStr("postgresql://u@127.0.0.1:1/x")})
    assert _up(elsewhere).restart_needed
    with exclusively(settings), pytest.raises(StackNotRunning, match="another"):
        lifecycle.down(settings, print, table=_servers)
    _keep_something(settings)
    ended = lifecycle.down(settings, print, table=_servers)
    assert (set(ended.programs), ended.stragglers) == ({"postgres", "redis"}, ())
    assert leftovers.processes(settings) == []
    assert lifecycle.down(settings, print, table=_servers) == lifecycle.DownReport()
    _up(settings)
    assert _is_kept(settings)
    for name in ("scratch/instance/attempt", "local/environment", "tools/crun"):
        (settings.home / name).mkdir(parents=True)
    said: list[str] = []
    lifecycle.down(settings, said.append, purge=True, table=_servers)
    assert sorted(path.name for path in settings.home.rglob("*")) == ["crun", "lock", "run", "tools"]
    assert said[-1].startswith(f"deleted the data in {settings.home}; tools stays")


def _keep_something(settings: Settings) -> None:
    with psycopg.connect(settings.database()) as connection:
        connection.execute("CREATE TABLE kept (number int)")


def _is_kept(settings: Settings) -> bool:
    with psycopg.connect(settings.database()) as connection:
        return connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)


def test_the_whole_stack_comes_up_and_the_doctor_finds_it_well(settings: Settings) -> None:
    found = _up(settings, programs)
    assert {"launcher", "control", "beat", "flower", "model"} <= set(found.started)
    looked_at = {check.name: check for check in doctor.checks(settings)}
    for name in ("python", "uv", "ports", "stack", "postgresql", "migrations", "redis", "artifacts"):
        assert looked_at[name].level == "ok", looked_at[name]
    stopped = lifecycle.down(settings, print).programs
    assert set(stopped) == set(found.programs)
    assert stopped.index("launcher") < stopped.index("gateway") < stopped.index("postgres")
    assert leftovers.processes(settings) == []


def test_the_doctor_of_a_stack_that_is_down_names_the_mend(settings: Settings) -> None:
    looked_at = {check.name: check for check in doctor.checks(settings)}
    for name in ("stack", "postgresql", "migrations", "redis"):
        assert looked_at[name].level == "fail", looked_at[name]
        assert "megaflow up" in looked_at[name].fix


def test_a_port_that_somebody_has_stops_up_with_the_setting_to_change(settings: Settings) -> None:
    with socket.socket() as somebody:
        somebody.bind(("127.0.0.1", settings.flower_port))
        somebody.listen()
        with pytest.raises(InstallationFailed, match="MEGAFLOW_FLOWER_PORT"):
            _up(settings)
    assert leftovers.processes(settings) == []


def test_servers_that_were_killed_or_left_behind_come_back_with_their_data(settings: Settings) -> None:
    _up(settings)
    with redis_client.Redis.from_url(settings.redis()) as client:
        client.lpush("queue", "task")
        time.sleep(1.5)  # appendfsync everysec
        killed = _pid(settings, "redis")
        os.kill(killed, signal.SIGKILL)
    eventually(lambda: _pid(settings, "redis") not in {0, killed})

    def length() -> int:
        with redis_client.Redis.from_url(settings.redis()) as client, suppress(redis_client.ConnectionError):
            return int(client.llen("queue"))
        return -1

    eventually(lambda: length() == 1)
    _keep_something(settings)
    _kill_supervisord(settings)
    assert set(_up(settings).started) == {"postgres", "redis"}
    assert _is_kept(settings)
    _kill_supervisord(settings)
    assert leftovers.processes(settings)
    ended = lifecycle.down(settings, print, table=_servers)
    assert {name.split()[1] for name in ended.stragglers} >= {"postgres", "redis-server"}
    assert leftovers.processes(settings) == []


def _kill_supervisord(settings: Settings) -> None:
    process = psutil.Process(int((settings.home / "run" / "supervisord.pid").read_text()))
    process.kill()
    eventually(lambda: has_ended(process))


def test_a_program_that_cannot_run_is_named_with_the_end_of_its_log(settings: Settings) -> None:
    broken = _python("broken", "-c", "raise SystemExit('the disk is made of cheese')")
    with pytest.raises(InstallationFailed, match=r"(?s)broken does not run.*made of cheese"):
        _up(settings, _servers_and(broken))
    assert leftovers.processes(settings) == [], "an `up` that fails stops what it started"


@pytest.mark.extra
@pytest.mark.timeout(120)
def test_a_control_worker_that_ends_before_it_dispatches_fails_up_with_its_log(settings: Settings) -> None:
    # It lives longer than what counts as started, so supervisord would start it again for ever.
    broken = _python("control", "-c", "import time; time.sleep(3); raise SystemExit('the ledger is made of cheese')")
    with pytest.raises(InstallationFailed, match=r"(?s)control worker.*made of cheese"):
        _up(settings, _servers_and(broken))
    assert leftovers.processes(settings) == []


def test_programs_get_exactly_these_settings_and_one_that_ignores_sigterm_is_killed(home_folder: Path) -> None:
    deaf = "import signal, subprocess, sys; signal.signal(15, signal.SIG_IGN); subprocess.run(sys.argv[1:])"
    written = "from app.settings import load; s = load(); open(s.home / 'seen', 'w').write(s.model_dump_json()); "
    witness = _python("witness", "-c", written + "import signal; signal.pause()")
    table = _servers_and(_python("deaf", "-c", deaf, sys.executable, *_WAIT), witness)
    strange = "http://h/%(ENV_PATH)s;x#y"
    settings = settings_in(home_folder.parent, model_base_url=strange, replay_scripts=(Path("/a"), Path("/b")))
    try:
        _up(settings, table)
        eventually(lambda: (home_folder / "seen").exists() and (home_folder / "seen").stat().st_size > 0)
        assert (home_folder / "seen").read_text() == settings.model_dump_json()
        family = [psutil.Process(_pid(settings, "deaf")), *psutil.Process(_pid(settings, "deaf")).children()]
    finally:
        lifecycle.down(settings, print, purge=True, table=table)
    assert [process for process in family if not has_ended(process)] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's PostgreSQL is another user's")
def test_a_home_below_a_closed_folder_comes_up_the_first_time(settings: Settings, home_folder: Path) -> None:
    (home_folder / "c").mkdir(mode=0o700, parents=True)
    closed = settings.model_copy(update={"home": home_folder / "c" / "h"})
    try:
        found = _up(closed)  # where the data is, is known only when the server was prepared
        assert (found.started, found.restart_needed) == (("postgres", "redis"), False)
    finally:
        lifecycle.down(closed, print, purge=True, table=_servers)


def test_down_ends_what_the_stack_started_and_spares_a_user_who_exports_the_home(settings: Settings) -> None:
    _up(settings)
    ours, users = (
        subprocess.Popen(
            [sys.executable, *_WAIT, "app.py"], env=os.environ | {name: str(settings.home)}, start_new_session=True
        )
        for name in (MARKER, "MEGAFLOW_HOME")
    )
    try:
        ended = lifecycle.down(settings, print, table=_servers)
        assert [name.split()[0] for name in ended.stragglers] == [str(ours.pid)]
        assert ours.wait(5) == -signal.SIGTERM
        assert users.poll() is None
    finally:
        for process in (ours, users):
            process.kill()
            process.wait()


@pytest.mark.docker
def test_down_removes_what_carries_its_label_and_nothing_else(settings: Settings, base_image_tag: str) -> None:
    stranger = f"test-{uuid.uuid4().hex[:8]}"
    with engine.connected(settings) as client:
        mine = _three_things(client, settings.installation, base_image_tag)
        others = _three_things(client, stranger, base_image_tag)
        try:
            removed = lifecycle.down(settings, print, table=_servers).removed
            assert (removed.containers, removed.networks, removed.volumes) == (1, 1, 1)
            assert [_is_there(client, kind, one) for kind, one in mine] == [False, False, False]
            assert [_is_there(client, kind, one) for kind, one in others] == [True, True, True]
        finally:
            leftovers.remove_from_engine(Settings(home=settings.home, installation=stranger))


def _three_things(
    client: docker.DockerClient, installation: str, image: str, instance: str = ""
) -> list[tuple[str, str]]:
    labels = {leftovers.LABEL: installation} | ({"megaflow.instance": instance} if instance else {})
    container = client.containers.run(image, "sleep 600", detach=True, labels=labels, network_mode="none")
    network = client.networks.create(f"n-{installation}-{instance}", labels=labels)
    volume = client.volumes.create(f"v-{installation}-{instance}", labels=labels)
    return [("containers", container.id), ("networks", network.id), ("volumes", volume.id)]


def _is_there(client: docker.DockerClient, kind: str, one: str) -> bool:
    with suppress(docker.errors.NotFound):
        return bool(getattr(client, kind).get(one))
    return False


def _removed_of_three(
    settings: Settings, image: str, own: str, other: str, remove: Callable[[], leftovers.Removed]
) -> leftovers.Removed:
    """What is removed where two instances and the installation have three things each: those of `own` alone."""
    with engine.connected(settings) as client:
        things = [_three_things(client, settings.installation, image, one) for one in (own, other, "")]
        found = remove()
        assert (found.containers, found.networks, found.volumes) == (1, 1, 1)
        there = [_is_there(client, kind, one) for three in things for kind, one in three]
        assert there == [False] * 3 + [True] * 6
    return found


@pytest.mark.docker
def test_a_joined_host_spares_what_other_hosts_have_on_the_same_engine(settings: Settings, base_image_tag: str) -> None:
    sparing = partial(leftovers.remove_from_engine, settings, sparing=["others"])
    _removed_of_three(settings, base_image_tag, "mine", "others", sparing)
    assert leftovers.remove_from_engine(settings, sparing=["elsewhere"]).containers == 2


def test_flower_asks_for_the_password_that_only_the_owner_can_read(settings: Settings) -> None:
    broker = ("-m", "celery", "-b", settings.broker(), "flower")
    program = _python("flower", *broker, f"--conf={flower.configuration_file(settings)}")
    _up(settings, _servers_and(program))
    secret = flower.password(settings)
    with httpx.Client(base_url=flower.url(settings)) as client:
        eventually(lambda: _status(client) != 0)
        assert _status(client) == 401
        assert _status(client, (settings.flower_user, "wrong")) == 401
        assert _status(client, (settings.flower_user, secret)) == 200
    listening = psutil.Process(_pid(settings, "flower")).net_connections("tcp4")
    assert {one.laddr.ip for one in listening if one.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    assert not [one for one in psutil.process_iter(["cmdline"]) if secret in " ".join(one.info["cmdline"] or [])]
    kept = flower.password_file(settings)
    assert kept is not None
    for path in (kept, flower.configuration_file(settings)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def _status(client: httpx.Client, auth: tuple[str, str] | None = None) -> int:
    try:
        return client.get("/workers", auth=auth, follow_redirects=True).status_code
    except httpx.ConnectError:
        return 0
