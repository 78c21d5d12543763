"""What a container may write, open and reach: disk limits, read-only roots, ports that lead to us, allowed hosts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from app.environments.networks import open_model_egress
from app.environments.networks.forwarding import forward
from app.environments.runtimes.docker import disk_limits
from app.environments.runtimes.docker.provider import DockerProvider
from app.environments.session.transports import TRANSPORTS, TransportKind
from app.host.engine import Engine
from app.models.spec import EnvironmentSpec, Network, Reuse
from app.settings import Settings
from tests.integration.docker_ground import Create, engine, out, provider, settings, tags_of
from tests.integration.docker_ground import create as create
from tests.integration.egress_servers import Server
from tests.integration.network_ground import forward_threads
from tests.waiting import eventually

__all__ = ["create", "engine", "provider", "settings"]
pytestmark = pytest.mark.docker


MIB = 1 << 20


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


FETCH = "python3 -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).read().decode())' "


def test_a_container_reaches_its_model_and_nothing_else(create: Create, server: Server) -> None:
    environment = create(network=Network.MODEL_ONLY)
    assert out(environment, "ls /sys/class/net").split() == ["lo"]
    assert "PROXY" not in out(environment, "env").upper()
    url, egress = open_model_egress(environment.forward, f"http://127.0.0.1:{server.port}/v1")
    assert '"path": "/v1/models"' in out(environment, f"{FETCH} {url}/models")
    assert "refused" in environment.run(f"{FETCH} http://127.0.0.1:{server.port}", timeout_s=20).text()
    assert "resolution" in environment.run(f"{FETCH} http://index.test/", timeout_s=20).text()
    egress.close()
    assert "refused" in environment.run(f"{FETCH} {url}", timeout_s=20).text()


def test_a_container_reaches_its_allowed_hosts_and_no_other_in_all_its_life(create: Create, server: Server) -> None:
    own = {"no_proxy": "", "NO_PROXY": ""}  # a proxy for every host
    host = f"localhost:{server.port}"
    environment = create(network=Network.ALLOWLIST, allowed_hosts=(host,), setup=("env > /env",))
    assert "HTTP_PROXY=http://127.0.0.1:" in environment.get("/env").decode()
    assert out(environment, "ls /sys/class/net").split() == ["lo"]
    for _ in range(2):
        found = environment.run(f"{FETCH} http://{host}/a", timeout_s=20, env=own)
        assert '"path": "/a"' in found.text()
        refused = environment.run(f"{FETCH} https://evil.test/", timeout_s=20, env=own)
        assert "evil.test:443 is not among the task's allowed_hosts" in refused.text()
        assert environment.describe()["egress"]["hosts"]["evil.test:443"] == {"refused": 1}
        assert environment.reset().clean
    environment.destroy()
    eventually(lambda: forward_threads() == [])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_elsewhere_gives_the_model_by_a_program_inside(
    transport: type[TransportKind], settings: Settings, engine: Engine, base_image_tag: str, server: Server
) -> None:
    provider = DockerProvider(settings, fetch_bundle=lambda bundle: b"", transports=(transport,))
    spec = EnvironmentSpec(image=base_image_tag)
    environment = provider.create(spec, tags_of(settings.installation), timeout_s=60)
    try:
        url, egress = open_model_egress(
            lambda port, serve: forward(None, environment.stream, port, serve), f"http://127.0.0.1:{server.port}/v1"
        )
        assert '"path": "/v1/models"' in out(environment, f"{FETCH} {url}/models")
        egress.close()
        gone = f"until {FETCH} {url} 2>&1 | grep refused; do sleep 0.1; done"  # one under way ends first
        assert "refused" in environment.run(gone, timeout_s=60).text()
    finally:
        environment.destroy()
    eventually(lambda: forward_threads() == [])


def test_the_limits_of_a_spec_are_an_engines(create: Create, engine: Engine, base_image_tag: str) -> None:
    config = disk_limits.limits(engine, EnvironmentSpec(image=base_image_tag))
    assert "read_only" not in config
    assert ("storage_opt" in config) is disk_limits.has_quotas(engine)
