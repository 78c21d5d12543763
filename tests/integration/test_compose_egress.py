"""Networks by policy where a task is several containers: main reaches its services, and the policy's way out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.environments.networks import open_model_egress
from app.environments.runtimes.compose.environment import ComposeEnvironment
from app.host.engine import Engine
from app.models.spec import Network
from tests.integration.egress_servers import Server, serving
from tests.integration.test_compose_environment import (
    DB,
    Create,
    address,
    engine,
    provider,
    reaches,
    services,
    settings,
)
from tests.integration.test_compose_environment import create as create

__all__ = ["engine", "provider", "settings"]
pytestmark = pytest.mark.docker

ELSEWHERE = "127.0.0.2"
"""Of this host's loopback: no variable exempts it, and nothing of it is in a container."""
FETCH = "python3 -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).read().decode())'"
NAMED = DB.replace("volumes:", "networks: {default: {aliases: [store]}}\n    volumes:", 1)
PROJECT = (
    f"services:\n  main: {{image: BASE, depends_on: {{db: {{condition: service_healthy}}}}}}{NAMED}volumes: {{kept: }}"
)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(host=ELSEWHERE) as made:
        yield made


def fetched(environment: ComposeEnvironment, url: str) -> str:
    return environment.run(f"{FETCH} {url}", timeout_s=20).text()


def test_with_allowed_hosts_main_reaches_its_services_those_hosts_and_nothing_else(
    create: Create, server: Server, engine: Engine
) -> None:
    host = f"{ELSEWHERE}:{server.port}"
    environment = create(PROJECT, network=Network.ALLOWLIST, allowed_hosts=(host,))
    for _ in range(2):
        for name in ("db", "store", address(engine, services(environment)["db"]["id"])):
            assert fetched(environment, f"http://{name}/first") == "x\n"
        assert '"path": "/a"' in fetched(environment, f"http://{host}/a")
        assert not reaches(environment, ELSEWHERE, server.port)
        assert "evil.test:443 is not among the task's allowed_hosts" in fetched(environment, "https://evil.test/")
        assert environment.describe()["egress"]["hosts"].keys() == {host, "evil.test:443"}
        assert environment.reset().clean


def test_with_the_model_alone_main_reaches_its_services_the_model_and_nothing_else(
    create: Create, server: Server
) -> None:
    environment = create(PROJECT, network=Network.MODEL_ONLY)
    url, egress = open_model_egress(environment.forward, f"http://{ELSEWHERE}:{server.port}/v1")
    assert '"path": "/v1/models"' in fetched(environment, f"{url}/models")
    assert fetched(environment, "http://db/first") == "x\n"
    assert "refused" in fetched(environment, f"http://{ELSEWHERE}:{server.port}/")
    assert "resolution" in fetched(environment, "http://index.test/")
    egress.close()
    assert "refused" in fetched(environment, f"{url}/models")


def test_a_health_check_of_main_takes_no_proxy_whatever_the_task_exempts(create: Create) -> None:
    """Its own variables stay as the task wants them."""
    check = f'{{test: "{FETCH} http://main:8000/ && {FETCH} http://db/first", interval: 0.5s, retries: 20}}'
    own = f"{{image: BASE, command: [python3, -m, http.server, '8000'], depends_on: [db], healthcheck: {check}}}"
    environment = create(
        f"services:\n  main: {own}{DB}volumes: {{kept: }}",
        network=Network.ALLOWLIST,
        allowed_hosts=("index.test",),
        env={"NO_PROXY": "mine.test", "no_proxy": "mine.test"},
    )
    assert environment.run("echo $NO_PROXY $no_proxy", timeout_s=20).text() == "mine.test mine.test\n"
    assert "not among the task's allowed_hosts" in environment.run(f"{FETCH} https://db/ 2>&1", timeout_s=20).text()
