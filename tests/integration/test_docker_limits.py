"""What a container may write, open and reach: disk limits, read-only roots, ports that lead to us, allowed hosts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from app.environments.runtimes.docker import disk_limits
from app.errors import EnvironmentFailed, EnvironmentOverLimit
from app.host.engine import Engine
from app.models.spec import EnvironmentSpec, Network, Resources, Reuse
from tests.integration import docker_ground
from tests.integration.docker_ground import Create, out

pytestmark = pytest.mark.docker

settings, engine = docker_ground.settings, docker_ground.engine
provider, create = docker_ground.provider, docker_ground.create

MIB = 1 << 20


# --- Disk -----------------------------------------------------------------------------------------------------------


def test_who_writes_more_than_it_may_is_ended_and_told(create: Create) -> None:
    neighbour, filler = create(), create(resources=Resources(disk_bytes=64 * MIB))
    filler.run("dd if=/dev/zero of=/half bs=1M count=32", timeout_s=30)
    with pytest.raises(EnvironmentOverLimit, match="disk limit"):
        filler.run("dd if=/dev/zero of=/more bs=1M count=64; sleep 30", timeout_s=60)
    for use in (filler.stats, lambda: filler.get("/half"), lambda: filler.run("true", timeout_s=5)):
        with pytest.raises(EnvironmentOverLimit, match="disk limit"):
            use()
    assert neighbour.run("true", timeout_s=20).ok


def test_all_that_an_engine_has_is_measured_by_id(create: Create, engine: Engine) -> None:
    environment = create()
    environment.run("dd if=/dev/zero of=/some bs=1M count=3", timeout_s=30)
    found = disk_limits._sizes(engine)[environment.id]
    assert 3 * MIB <= found.size_bytes < 4 * MIB
    assert environment.written() == found


@pytest.mark.parametrize(
    ("mounts", "found"),
    [
        ("1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 8:2 / /var/lib rw - xfs /dev/sda2 rw,prjquota", True),
        ("1 0 8:1 / / rw - xfs /dev/sda1 rw,pquota\n2 1 8:2 / /var/lib rw - ext4 /dev/sda2 rw", False),
        ("1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 8:2 / /var/lib rw - xfs /dev/sda2 rw,usrquota", False),
        ("1 0 8:1 / / rw shared:1 - xfs /dev/sda1 rw,attr2,prjquota", True),
    ],
)
def test_quotas_are_known_by_the_mount_that_has_the_folder(mounts: str, found: bool) -> None:
    assert disk_limits.quotas_on(mounts, Path("/var/lib/docker")) is found


def test_open_files_are_bounded_and_no_core_is_dumped(create: Create) -> None:
    environment = create()
    assert out(environment, "ulimit -c; ulimit -Hc") == "0\n0\n"
    assert 1 << 14 <= int(out(environment, "ulimit -Hn")) <= 1 << 20


# --- Read-only ------------------------------------------------------------------------------------------------------


def test_a_shared_environment_can_be_written_to_in_memory_alone(create: Create) -> None:
    environment = create(reuse=Reuse.SHARED_READONLY, setup=("echo made > /etc/made-by-read-only-test",))
    assert out(environment, "cat /etc/made-by-read-only-test") == "made\n"
    for place in ("/", "/etc", "/testbed", "/usr/bin"):
        assert not environment.run(f"touch {place}/x", cwd="/", timeout_s=20).ok, place
    for place in ("/tmp", "/var/tmp", "/run", "/dev/shm"):
        assert environment.run(f"echo 'echo ran' > {place}/x", timeout_s=20).ok, place
    assert out(environment, "chmod +x /tmp/x; /tmp/x") == "ran\n"
    proof = environment.reset()
    assert (proof.clean, proof.left) == (True, ())
    assert not environment.run("test -e /tmp/x -o -e /run/x -o -e /dev/shm/x", timeout_s=20).ok


# --- Ports and networks ---------------------------------------------------------------------------------------------

_ASK = "python3 -c \"import socket as s; print(s.create_connection(('127.0.0.1', {port}), 5).makefile().read())\""


def greet(connection: socket.socket) -> None:
    with connection:
        connection.sendall(b"from outside")


def test_a_port_inside_leads_here_until_a_reset(create: Create) -> None:
    environment = create()
    forward = environment.forward(0, greet)
    assert out(environment, _ASK.format(port=forward.port)) == "from outside\n"
    assert environment.reset().clean
    assert not environment.run(_ASK.format(port=forward.port), timeout_s=20).ok
    again = environment.forward(forward.port, greet)
    assert out(environment, _ASK.format(port=again.port)) == "from outside\n"
    again.close()
    assert not environment.run(_ASK.format(port=again.port), timeout_s=20).ok


def test_a_destroyed_environment_opens_no_port(create: Create) -> None:
    environment = create()
    environment.destroy()
    with pytest.raises(EnvironmentFailed):
        environment.forward(0, greet)


_FETCH = "python3 -c \"import urllib.request as u; u.urlopen('http://other.invalid/', timeout=5)\""


def test_a_host_that_is_not_allowed_is_refused_in_all_its_life(create: Create) -> None:
    environment = create(network=Network.ALLOWLIST, allowed_hosts=("example.invalid",), setup=("env > /env",))
    assert "HTTP_PROXY=http://127.0.0.1:" in environment.get("/env").decode()
    assert out(environment, "ls /sys/class/net").split() == ["lo"]
    assert b"403" in environment.run(_FETCH, timeout_s=30).stderr
    assert environment.describe()["egress"]["hosts"]
    assert environment.reset().clean
    assert b"403" in environment.run(_FETCH, timeout_s=30).stderr


def test_nothing_listens_where_only_the_model_may_be_reached(create: Create) -> None:
    environment = create(network=Network.MODEL_ONLY)
    assert out(environment, "ls /sys/class/net").split() == ["lo"]
    assert "PROXY" not in out(environment, "env").upper()


def test_the_limits_of_a_spec_are_an_engines(create: Create, engine: Engine, base_image_tag: str) -> None:
    config = disk_limits.limits(engine, EnvironmentSpec(image=base_image_tag))
    assert "read_only" not in config
    assert ("storage_opt" in config) is disk_limits.has_quotas(engine)
