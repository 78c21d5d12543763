"""What a task with an open network does not reach: the host, link-local and private addresses, other networks.

The first tests build a host, a task and the rest of the world from network namespaces; nothing leaves them.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.environments.networks import firewall, open_model_egress
from app.environments.runtimes.docker.provider import DockerProvider
from app.errors import EnvironmentFailed
from app.host.engine import Engine
from app.models.spec import EnvironmentSpec, Network
from app.settings import Settings
from tests.integration.docker_fixture import Create, create, engine, out, provider, settings, tags_of
from tests.integration.egress_servers import serving
from tests.services import missing

__all__ = ["create", "engine", "provider", "settings"]

PREFIX = firewall.prefix_of("ns")
BRIDGE = f"{PREFIX}-tasks"
RESOLVER = "10.255.0.53"
PUBLIC = "203.0.113.7"
METADATA = "169.254.169.254"
PRIVATE = ("10.1.2.3", "100.100.100.200", "168.63.129.16", "172.20.0.9", "192.168.7.7", METADATA)

LISTEN = """
import select, socket, sys
found = []
for port in map(int, sys.argv[1:]):
    for kind, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        one = socket.socket(kind, socket.SOCK_STREAM)
        if kind == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind((address, port))
        one.listen(64)
        found.append(one)
print("ready", flush=True)
while True:
    for one in select.select(found, [], [])[0]:
        one.accept()[0].close()
"""
# An IPv6 address that is still being checked for duplicates sends nothing, for a second or two.
START = """
for one in all default; do echo 0 > /proc/sys/net/ipv6/conf/$one/accept_dad; done
ip link set lo up
echo ready
exec sleep 300
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"


class Namespace:
    """A process with a network and mounts of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", START],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            self.end()
            missing("network namespaces: needs root")
        self.pid = self._process.pid
        self._enter = ["nsenter", "--target", str(self.pid), "--net", "--mount"]

    def run(self, *command: str) -> str:
        done = subprocess.run([*self._enter, *command], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def shell(self, lines: str) -> str:
        return self.run("sh", "-euc", lines)

    def reaches(self, address: str, port: int = 80) -> bool:
        done = subprocess.run([*self._enter, "python3", "-c", CONNECT, address, str(port)], capture_output=True)
        return done.returncode == 0

    def reached(self, addresses: Iterable[str]) -> set[str]:
        """Those of the addresses that answer at port 80."""
        with ThreadPoolExecutor(16) as threads:
            tried = list(addresses)
            return {one for one, reached in zip(tried, threads.map(self.reaches, tried), strict=True) if reached}

    def listen(self, *ports: int) -> subprocess.Popen[bytes]:
        command = [*self._enter, "python3", "-c", LISTEN, *map(str, ports)]
        found = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert found.stdout is not None
        assert found.stdout.readline() == b"ready\n"
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


class World:
    """A host that forwards as a container engine's does, two tasks on one of its bridges, and what is around it."""

    def __init__(self) -> None:
        self.host, self.task, self.other, self.around = (Namespace() for _ in range(4))
        self._listening: list[subprocess.Popen[bytes]] = []

    def build(self, folder: Path) -> None:
        resolvers = folder / "resolv.conf"
        resolvers.write_text(f"nameserver {RESOLVER}\nnameserver 127.0.0.53\n")
        self.host.shell(
            f"""mount --bind {resolvers} /etc/resolv.conf
            echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
            ip link add {BRIDGE} type bridge; ip addr add 10.200.0.1/24 dev {BRIDGE}
            ip addr add fd01::1/64 dev {BRIDGE} nodad; ip link set {BRIDGE} up
            ip link add out type veth peer name back netns {self.around.pid}
            ip addr add 10.201.0.1/24 dev out; ip addr add fd02::1/64 dev out nodad; ip link set out up
            ip route add default via 10.201.0.2; ip -6 route add default via fd02::2"""
        )
        for number, task in enumerate((self.task, self.other), start=2):
            self.host.shell(
                f"ip link add t{number} type veth peer name eth0 netns {task.pid}"
                f"; ip link set t{number} master {BRIDGE} up"
            )
            task.shell(
                f"""ip addr add 10.200.0.{number}/24 dev eth0; ip addr add fd01::{number}/64 dev eth0 nodad
                ip link set eth0 up; ip route add default via 10.200.0.1; ip -6 route add default via fd01::1"""
            )
        addresses = "\n".join(f"ip addr add {one}/32 dev lo" for one in (PUBLIC, RESOLVER, *PRIVATE))
        self.around.shell(
            f"""ip addr add 10.201.0.2/24 dev back; ip addr add fd02::2/64 dev back nodad; ip link set back up
            {addresses}
            ip addr add fd00:ec2::254/128 dev lo nodad; ip addr add 2001:db8::7/128 dev lo nodad
            ip route add default via 10.201.0.1; ip -6 route add default via fd02::1"""
        )
        for place, ports in ((self.host, (80,)), (self.other, (80,)), (self.around, (53, 80, 443))):
            self._listening.append(place.listen(*ports))

    def protect(self, *allowed: str) -> None:
        rules = firewall.rules(Settings(open_network_allow=",".join(allowed)).open_network_allow)
        self.host.run("sh", "-c", firewall._SCRIPT, "firewall", PREFIX, BRIDGE, rules)

    def rules(self) -> str:
        return self.host.run("iptables", "-t", "mangle", "-S") + self.host.run("ip6tables", "-t", "mangle", "-S")

    def end(self) -> None:
        for one in self._listening:
            one.kill()
            one.communicate()
        for one in (self.host, self.task, self.other, self.around):
            one.end()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World()
    try:
        made.build(tmp_path)
        yield made
    finally:
        made.end()


REACHED_WITHOUT = (*PRIVATE, "10.200.0.1", "10.201.0.1", "10.201.0.2", "fd00:ec2::254", "fd01::1", "2001:db8::7")


def test_the_rules_leave_what_is_public_the_resolver_and_the_tasks_own_network(world: World) -> None:
    assert world.task.reached(REACHED_WITHOUT) == set(REACHED_WITHOUT), "else this test proves nothing"
    world.protect()
    assert world.task.reached(REACHED_WITHOUT) == set()
    assert world.task.reaches(PUBLIC)
    assert world.task.reaches(RESOLVER, 53)
    assert not world.task.reaches(RESOLVER, 80)
    assert world.task.reaches("10.200.0.3"), "containers of one project"


def test_the_host_reaches_the_task_and_gets_its_answer(world: World) -> None:
    world.protect()
    assert world.host.reaches("10.200.0.3")


def test_what_the_settings_allow_is_reached_and_no_more(world: World) -> None:
    world.protect("10.1.2.3:443", "192.168.7.0/24", "10.200.0.1:80")
    assert world.task.reaches("10.1.2.3", 443)
    assert not world.task.reaches("10.1.2.3", 80)
    assert world.task.reaches("192.168.7.7")
    assert world.task.reaches("10.200.0.1", 80), "a service of the host"
    assert not world.task.reaches(METADATA)
    world.protect()  # the setting was taken back
    assert not world.task.reaches("10.1.2.3", 443)


def test_putting_them_in_place_again_changes_nothing_and_what_was_lost_comes_back(world: World) -> None:
    world.protect()
    before = world.rules()
    assert before.count(f"-i {PREFIX}+") == 4
    world.protect()
    assert world.rules() == before
    world.host.run("iptables", "-t", "mangle", "-F", "FORWARD")
    assert world.task.reaches(METADATA)
    world.protect()
    assert world.rules() == before
    world.host.run("sh", "-c", firewall._SCRIPT, "firewall", PREFIX, "", "")
    assert PREFIX not in world.rules()


@pytest.mark.docker
def test_an_open_task_reaches_no_listener_of_the_host(create: Create, engine: Engine) -> None:
    environment = create(network=Network.OPEN)
    [joined] = engine.api.inspect_container(environment.id)["NetworkSettings"]["Networks"].values()
    own = {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    addresses = {joined["Gateway"], "172.17.0.1", *(one for one in own if not one.startswith("127."))}
    with socket.create_server(("0.0.0.0", 0), backlog=64) as server:
        for address in sorted(addresses):
            done = environment.run(f"python3 -c '{CONNECT}' {address} {server.getsockname()[1]}", timeout_s=20)
            assert not done.ok, address
    assert METADATA not in out(environment, "ip route 2>/dev/null; cat /etc/resolv.conf")


@pytest.mark.docker
def test_an_open_task_reaches_its_model_all_the_same(create: Create) -> None:
    environment = create(network=Network.OPEN)
    with serving() as server:
        url, _ = open_model_egress(environment.forward, f"http://127.0.0.1:{server.port}/v1")
        fetch = f'import urllib.request as u; print(u.urlopen("{url}/models", timeout=5).read().decode())'
        assert '"path": "/v1/models"' in out(environment, f"python3 -c '{fetch}'")


@pytest.mark.docker
def test_a_network_of_that_name_that_is_not_ours_is_refused(
    provider: DockerProvider, engine: Engine, settings: Settings, base_image_tag: str
) -> None:
    installation = f"{settings.installation}-b"
    spec = EnvironmentSpec(image=base_image_tag, network=Network.OPEN)
    name = f"megaflow-tasks-{installation}"
    made = engine.api.create_network(name, driver="bridge", labels={"megaflow": installation})["Id"]
    try:
        with pytest.raises(EnvironmentFailed, match=rf"network {name}.*expected.*enable_icc.*docker network rm"):
            provider.create(spec, tags_of(installation), timeout_s=60)
    finally:
        engine.api.remove_network(made)


@pytest.mark.docker
def test_a_worker_that_cannot_call_iptables_lets_the_engine_do_it(engine: Engine, settings: Settings) -> None:
    installation = f"{settings.installation}-c"
    bridge = f"{firewall.prefix_of(installation)}-tasks"
    options = {"com.docker.network.bridge.name": bridge}
    made = engine.api.create_network(f"megaflow-tasks-{installation}", driver="bridge", options=options)["Id"]
    script = ["sh", "-c", firewall._SCRIPT, "firewall", firewall.prefix_of(installation), bridge, firewall.rules(())]
    try:
        assert firewall._on_the_engines_host(engine, settings, installation, script) is None
        stands = subprocess.run(["iptables", "-t", "mangle", "-S"], capture_output=True, text=True).stdout
        assert stands.count(f"-i {firewall.prefix_of(installation)}+") == 2
        assert f"-d {METADATA.rsplit('.', 2)[0]}.0.0/16 -j DROP" in stands
    finally:
        engine.api.remove_network(made)
        firewall.remove(installation)
    stands = subprocess.run(["iptables", "-t", "mangle", "-S"], capture_output=True, text=True).stdout
    assert firewall.prefix_of(installation) not in stands


@pytest.mark.docker
def test_without_the_rules_no_open_task_starts_unless_the_settings_say_so(engine: Engine, settings: Settings) -> None:
    """An engine whose host does not have the bridge, as one in a virtual machine of its own."""
    with pytest.raises(EnvironmentFailed, match=r"network 'open'.*no interface.*MEGAFLOW_OPEN_NETWORK_FILTER"):
        firewall.ensure(engine, settings, settings.installation, "mf-not-here")
    waived = settings.model_copy(update={"open_network_filter": False})
    firewall.ensure(engine, waived, settings.installation, "mf-not-here")
