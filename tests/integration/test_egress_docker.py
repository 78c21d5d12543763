"""Networks by policy in an engine's containers: the same, by the container's own network."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.environments.networks import open_egress, open_model_egress, variables
from app.environments.networks.forwarding import forward
from app.environments.runtimes.docker.provider import DockerProvider
from app.environments.session.transports import TRANSPORTS, TransportKind
from app.errors import EnvironmentFailed
from app.host.engine import Engine
from app.models.spec import EnvironmentSpec, Network
from app.settings import Settings
from tests.integration.docker_ground import Create, engine, out, provider, settings, tags_of
from tests.integration.docker_ground import create as create
from tests.integration.egress_servers import Server, serving
from tests.integration.network_ground import forward_threads
from tests.waiting import eventually

__all__ = ["create", "engine", "provider", "settings"]
pytestmark = pytest.mark.docker

FETCH = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).read().decode())"


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


def test_a_container_reaches_its_model_and_nothing_else(create: Create, server: Server) -> None:
    environment = create()
    url, egress = open_model_egress(environment.forward, f"http://127.0.0.1:{server.port}/v1")
    assert '"path": "/v1/models"' in out(environment, f"python3 -c '{FETCH}' {url}/models")
    assert "refused" in environment.run(f"python3 -c '{FETCH}' http://127.0.0.1:{server.port}", timeout_s=20).text()
    assert "resolution" in environment.run(f"python3 -c '{FETCH}' http://index.test/", timeout_s=20).text()
    egress.close()
    assert "refused" in environment.run(f"python3 -c '{FETCH}' {url}", timeout_s=20).text()


def test_a_container_reaches_its_allowed_hosts(create: Create, server: Server) -> None:
    environment = create()
    spec = EnvironmentSpec(image="any", network=Network.ALLOWLIST, allowed_hosts=(f"localhost:{server.port}",))
    egress = open_egress(spec, environment.forward)
    env = {**variables(spec), "no_proxy": "", "NO_PROXY": ""}
    found = environment.run(f"python3 -c '{FETCH}' http://localhost:{server.port}/a", timeout_s=20, env=env)
    assert '"path": "/a"' in found.text()
    refused = environment.run(f"python3 -c '{FETCH}' https://evil.test/", timeout_s=20, env=env)
    assert "evil.test:443 is not among the task's allowed_hosts" in refused.text()
    environment.destroy()
    eventually(lambda: forward_threads() == [])
    assert egress is not None
    assert egress.describe()["hosts"]["evil.test:443"] == {"refused": 1}


def test_a_container_that_has_ended_opens_no_port(create: Create, server: Server) -> None:
    environment = create()
    environment.destroy()
    with pytest.raises(EnvironmentFailed):
        open_model_egress(environment.forward, f"http://127.0.0.1:{server.port}")


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
        assert '"path": "/v1/models"' in out(environment, f"python3 -c '{FETCH}' {url}/models")
        egress.close()
        gone = f"while python3 -c '{FETCH}' {url}; do sleep 0.1; done"
        assert "refused" in environment.run(gone, timeout_s=60).text()
    finally:
        environment.destroy()
    eventually(lambda: forward_threads() == [])
