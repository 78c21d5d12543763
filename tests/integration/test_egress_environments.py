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
from tests.integration.docker_fixture import tags_of
from tests.integration.egress_servers import Server
from tests.integration.network_fixture import forward_threads, nothing_left
from tests.integration.oci_fixture import add_image
from tests.services import missing, short_folder
from tests.waiting import eventually


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


class Fixture:
    """Makes environments, and ends them."""

    def __init__(self, provider: OciProvider, image: str, settings: Settings, held: ExitStack) -> None:
        self._provider = provider
        self._image = image
        self._settings = settings
        self._held = held

    def create(self, *allowed: str, setup: tuple[str, ...] = (), **env: str) -> Environment:
        network = Network.ALLOWLIST if allowed else Network.NONE
        spec = EnvironmentSpec(
            image=self._image, workdir="/tmp", network=network, allowed_hosts=allowed, setup=setup, env=env
        )
        made = self._provider.create(spec, tags_of(self._settings.installation), timeout_s=30)
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
def fixture(oci: OciProvider, image: str, oci_settings: Settings) -> Iterator[Fixture]:
    with nothing_left(), ExitStack() as held:
        yield Fixture(oci, image, oci_settings, held)


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


def test_the_model_is_all_that_there_is(fixture: Fixture, server: Server) -> None:
    environment, neighbour = fixture.create(), fixture.create()
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


def test_a_task_with_allowed_hosts_has_its_proxy_from_the_first_command_and_after_a_reset(
    fixture: Fixture, server: Server
) -> None:
    name = f"localhost:{server.port}"
    environment = fixture.create(name, setup=(f"curl -sS http://{name}/set-up > /found",), NO_PROXY="", no_proxy="")
    assert b'"path": "/set-up"' in environment.get("/found"), "set-up commands have it, and it began anew after them"
    shell = environment.shell()
    assert b"HTTPS_PROXY=http://127.0.0.1" in shell.run("env", timeout_s=10).stdout
    shell.close()
    for path in ("first", "again"):
        assert f'"path": "/{path}"' in said(environment, f"curl -sS http://{name}/{path}")
        assert environment.describe()["egress"]["hosts"][name]["connections"] == 1
        assert environment.reset().clean


def test_an_environment_that_somebody_else_ends_takes_its_ports_along(fixture: Fixture, server: Server) -> None:
    environment = fixture.create()
    open_model_egress(environment.forward, f"http://127.0.0.1:{server.port}")
    for pid in Cgroup(environment.id).processes():
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: forward_threads() == [])


def test_programs_inside_cannot_end_what_serves_them(fixture: Fixture, server: Server) -> None:
    environment = fixture.create()
    url, _ = open_model_egress(environment.forward, f"http://127.0.0.1:{server.port}")
    environment.run("kill -9 -1", timeout_s=10)
    assert '"path": "/still"' in said(environment, f"curl -sS {url}/still")
