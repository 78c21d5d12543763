"""Networks by policy, as what runs inside real environments finds them: curl and bash, made without a daemon."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from app.environments.contract import Environment
from app.environments.networks import Egress, open_egress, open_model_egress, variables
from app.environments.runtimes.oci import OciProvider
from app.host.cgroups import Cgroup
from app.models.spec import EnvironmentSpec, Network
from app.settings import Settings
from tests.integration.egress_servers import Server, certified, serving
from tests.integration.network_ground import forward_threads, nothing_left
from tests.integration.oci_ground import add_image, oci, oci_cache, oci_programs, oci_settings, tags
from tests.services import missing, short_folder
from tests.waiting import eventually

__all__ = ["oci", "oci_cache", "oci_programs", "oci_settings"]


@pytest.fixture(scope="session")
def curl() -> Iterator[Path]:
    """A layer with this host's curl."""
    program = shutil.which("curl")
    if program is None:
        missing("curl")
    assert program is not None
    with short_folder() as folder:
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for file in (program, *(word for word in listed.split() if word.startswith("/") and not word.endswith(":"))):
            place = folder / "layer" / file.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, place)
        (folder / "layer" / "bin").mkdir(exist_ok=True)
        shutil.copy(program, folder / "layer" / "bin" / "curl")
        yield folder / "layer"


@pytest.fixture
def image(oci: OciProvider, oci_programs: Path, curl: Path) -> str:
    return add_image(oci.store, {"sha256:programs": oci_programs, "sha256:curl": curl})


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


class Ground:
    """Makes environments, and ends them."""

    def __init__(self, provider: OciProvider, image: str, settings: Settings, held: ExitStack) -> None:
        self._provider = provider
        self._image = image
        self._settings = settings
        self._held = held

    def create(self, *allowed: str, **env: str) -> Environment:
        network = Network.ALLOWLIST if allowed else Network.NONE
        spec = EnvironmentSpec(image=self._image, workdir="/tmp", network=network, allowed_hosts=allowed, env=env)
        made = self._provider.create(spec, tags(self._settings.installation), timeout_s=30)
        self._held.callback(made.destroy)
        return made

    def allowed(self, *hosts: str) -> tuple[Environment, Egress, dict[str, str]]:
        """An environment, its egress and its variables; these mean a proxy for every host."""
        spec = EnvironmentSpec(image=self._image, network=Network.ALLOWLIST, allowed_hosts=hosts)
        made = self.create()
        egress = open_egress(spec, made.forward)
        assert egress is not None
        return made, egress, {**variables(spec), "no_proxy": "", "NO_PROXY": ""}


@pytest.fixture
def ground(oci: OciProvider, image: str, oci_settings: Settings) -> Iterator[Ground]:
    with nothing_left(), ExitStack() as held:
        yield Ground(oci, image, oci_settings, held)


def said(environment: Environment, command: str, **env: str) -> str:
    return environment.run(command, timeout_s=20, env=env).text()


def reached(environment: Environment, host: str, port: int, protocol: str = "tcp") -> bool:
    opened = f"exec 3<>/dev/{protocol}/{host}/{port} && echo x >&3"
    return environment.run(f"bash -c '{opened}'", timeout_s=5).ok


def own_address() -> str:
    """One of this host's beside its loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect(("192.0.2.1", 9))  # nothing is sent
        return str(asking.getsockname()[0])


def test_the_model_is_all_that_there_is(ground: Ground, server: Server) -> None:
    environment, neighbour = ground.create(), ground.create()
    url, egress = open_model_egress(environment.forward, f"http://127.0.0.1:{server.port}/v1")
    assert '"path": "/v1/models"' in said(environment, f"curl -sS {url}/models")
    port = egress.port
    assert not reached(environment, "127.0.0.1", server.port)
    assert not reached(neighbour, "127.0.0.1", port)
    assert not reached(environment, own_address(), server.port)
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        assert not reached(environment, own_address(), everywhere.getsockname()[1])
    assert not reached(environment, "169.254.169.254", 80)
    assert not reached(environment, "192.0.2.1", 53, "udp")
    assert "Could not resolve" in said(environment, "curl -sS http://index.test/")
    egress.close()
    assert not reached(environment, "127.0.0.1", port)


def test_what_an_agent_inside_is_told_comes_word_by_word(ground: Ground, server: Server) -> None:
    environment = ground.create()
    url, egress = open_model_egress(environment.forward, f"http://127.0.0.1:{server.port}")
    with_curl = environment.stream(["curl", "-sSN", f"{url}/stream"])
    for word in (b"one", b"two", b"three"):
        server.speak.release()
        assert with_curl.read(timeout_s=10) == b"data: " + word + b"\n\n"
    assert with_curl.wait(10) == 0
    with_curl.close()
    egress.close()


def test_allowed_hosts_are_reached_through_variables_alone(ground: Ground, server: Server, tmp_path: Path) -> None:
    context, certificate = certified(tmp_path)
    with serving(context) as secure:
        environment, egress, env = ground.allowed(f"localhost:{server.port}", f"localhost:{secure.port}")
        environment.put("/tmp/ca.pem", certificate.read_bytes())
        assert '"path": "/a"' in said(environment, f"curl -sS http://localhost:{server.port}/a", **env)
        command = f"curl -sS --cacert /tmp/ca.pem https://localhost:{secure.port}/b"
        assert '"path": "/b"' in said(environment, command, **env)
        hosts = egress.describe()["hosts"]
        assert {name: found["connections"] for name, found in hosts.items()} == {
            f"localhost:{server.port}": 1,
            f"localhost:{secure.port}": 1,
        }


def test_a_task_with_allowed_hosts_has_its_proxy_from_the_first_command_and_after_a_reset(
    ground: Ground, server: Server
) -> None:
    name = f"localhost:{server.port}"
    environment = ground.create(name, NO_PROXY="", no_proxy="")
    for path in ("first", "again"):
        assert f'"path": "/{path}"' in said(environment, f"curl -sS http://{name}/{path}")
        assert environment.describe()["egress"]["hosts"][name]["connections"] == 1
        assert environment.reset().clean


def test_a_refused_host_is_told_inside_and_counted_outside(ground: Ground) -> None:
    environment, egress, env = ground.allowed("index.test")
    assert "not among the task's allowed_hosts (index.test)" in said(environment, "curl -sSv https://evil.test", **env)
    assert "not among the task's allowed_hosts (index.test)" in said(environment, "curl -sS http://evil.test", **env)
    assert egress.describe()["hosts"] == {"evil.test:443": {"refused": 1}, "evil.test:80": {"refused": 1}}


def test_a_reset_ends_the_ports_and_they_can_be_had_again(ground: Ground, server: Server) -> None:
    environment = ground.create()
    open_model_egress(environment.forward, f"http://127.0.0.1:{server.port}")
    assert environment.reset().clean
    eventually(lambda: forward_threads() == [])
    url, _ = open_model_egress(environment.forward, f"http://127.0.0.1:{server.port}")
    assert '"path": "/again"' in said(environment, f"curl -sS {url}/again")


def test_an_environment_that_somebody_else_ends_takes_its_ports_along(ground: Ground, server: Server) -> None:
    environment = ground.create()
    open_model_egress(environment.forward, f"http://127.0.0.1:{server.port}")
    for pid in Cgroup(environment.id).processes():
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: forward_threads() == [])


def test_programs_inside_cannot_end_what_serves_them(ground: Ground, server: Server) -> None:
    environment = ground.create()
    url, _ = open_model_egress(environment.forward, f"http://127.0.0.1:{server.port}")
    environment.run("kill -9 -1", timeout_s=10)
    assert '"path": "/still"' in said(environment, f"curl -sS {url}/still")


def test_fifty_environments_have_each_their_own_model(ground: Ground) -> None:
    environments = [ground.create() for _ in range(50)]
    for number, environment in enumerate(environments):
        environment.forward(8411, lambda connection, number=number: connection.sendall(b"%d" % number))  # type: ignore[misc]
    answers = [said(environment, "bash -c 'cat </dev/tcp/127.0.0.1/8411'") for environment in environments]
    assert answers == [str(number) for number in range(50)]
    eventually(lambda: set(forward_threads()) == {"forward-accept"})
