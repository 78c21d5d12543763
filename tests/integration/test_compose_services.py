"""Services of a project: which one failed is said, what a reset leaves of them, and which networks they reach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from app.environments.networks import open_model_egress
from app.environments.runtimes.compose.environment import ComposeEnvironment
from app.errors import ServiceUnhealthy
from app.host.engine import Engine
from app.models.spec import Network
from app.settings import Settings
from app.workers.limit_account import LimitAccount
from tests.integration.egress_servers import Server, serving
from tests.integration.test_compose_environment import (
    DB,
    SMALL,
    Create,
    address,
    create,
    engine,
    left,
    provider,
    reaches,
    services,
    settings,
)
from tests.waiting import eventually

__all__ = ["create", "engine", "provider", "settings"]
pytestmark = pytest.mark.docker

MIB = 1 << 20


@pytest.fixture
def broken(base_image_tag: str) -> dict[str, bytes]:
    """The recipe of an image with an entrypoint that is not there and a script whose interpreter is not."""
    script = "printf '#!/nope\\n' >/run.sh && chmod 755 /run.sh"
    return {"broken/Dockerfile": f'FROM {base_image_tag}\nRUN {script}\nENTRYPOINT ["/nope"]\n'.encode()}


@pytest.mark.parametrize(
    ("keys", "code", "said"),
    [
        ("command: [no-such-program, --port, '1']", 127, "no-such-program"),
        ("entrypoint: [/run.sh]", 127, "/run.sh"),
        ("command: [/etc/passwd], entrypoint: []", 126, "/etc/passwd"),
    ],
    ids=["name", "interpreter", "no program"],
)
def test_a_command_of_main_that_cannot_be_executed_is_told_and_nothing_is_left(
    create: Create, engine: Engine, settings: Settings, broken: dict[str, bytes], keys: str, code: int, said: str
) -> None:
    source = "build: broken" if "/run.sh" in keys else "image: BASE"
    with pytest.raises(ServiceUnhealthy, match=rf"'main' did not start \(exit code {code}\)") as caught:
        create(f"services: {{main: {{{source}, {keys}}}}}", files=broken)
    assert str(caught.value).partition("Its log ends with:")[2].count(said) == 1
    assert left(engine, settings) == []


def test_the_entrypoint_of_mains_image_goes_before_a_command_of_the_file(
    create: Create, broken: dict[str, bytes]
) -> None:
    with pytest.raises(ServiceUnhealthy, match=r"'main' did not start \(exit code 127\): .*'/nope serve'"):
        create("services: {main: {build: broken, command: [serve]}}", files=broken)
    environment = create("services: {main: {build: broken}}", files=broken)
    assert environment.run("echo well", timeout_s=20).text() == "well\n"


@pytest.mark.parametrize("keys", ["image: BASE, command: [/nope]", "image: BASE, user: nobody-here"])
def test_a_service_that_the_engine_cannot_start_is_named(
    create: Create, engine: Engine, settings: Settings, broken: dict[str, bytes], keys: str
) -> None:
    with pytest.raises(ServiceUnhealthy, match=r"service 'db': .*(/nope|nobody-here)"):
        create(f"services: {{main: {{image: BASE}}, db: {{{keys}}}}}", files=broken)
    assert left(engine, settings) == []


HOG = "python3 -c 'bytearray(200 << 20)'"
PAIR = "services: {main: {image: BASE}, db: {image: BASE, mem_limit: 64m, command: COMMAND}}"


def short(told: dict[str, dict[str, Any]]) -> dict[str, bool]:
    return {name: one["out_of_memory"] for name, one in told.items()}


def test_a_service_in_which_somebody_was_killed_for_memory_is_told_by_name(create: Create) -> None:
    environment = create(PAIR.replace("COMMAND", "[sleep, '600']"))
    environment.run_in("db", f"{HOG}; true", timeout_s=30)
    account = LimitAccount(SMALL)
    account.watch(environment)
    assert account.look()["memory"] == {"limit_bytes": SMALL.memory_bytes, "killed": {"agent": 0}}
    environment.run_in("db", f"{HOG}; true", timeout_s=30)
    account.look()
    account.stage = "grading"
    environment.run_in("db", f"{HOG}; {HOG}; true", timeout_s=30)
    environment.run_in("db", "kill -KILL $$", timeout_s=30)
    db = {"limit_bytes": 64 * MIB, "killed": {"agent": 1, "grading": 2}}
    found = {"limit_bytes": SMALL.memory_bytes, "killed": {"agent": 0, "grading": 0}, "services": {"db": db}}
    assert account.look()["memory"] == found
    told = services(environment)
    assert short(told) == {"main": False, "db": True}
    assert (told["db"]["state"], environment.run("true", timeout_s=20).ok) == ("running", True)
    environment.destroy()
    assert short(services(environment)) == {"main": False, "db": True}
    assert account.look()["memory"] == found, "what was known stays"


def test_a_service_that_ends_for_memory_in_mid_task_is_told_by_name(create: Create) -> None:
    command = "[sh, -c, 'while [ ! -e /go ]; do sleep 0.05; done; exec python3 -c \"bytearray(200 << 20)\"']"
    environment = create(PAIR.replace("COMMAND", command))
    account = LimitAccount(SMALL)
    account.watch(environment)
    assert short(services(environment)) == {"main": False, "db": False}
    environment.run_in("db", "touch /go", timeout_s=20)
    eventually(lambda: services(environment)["db"]["state"] != "running")
    told = services(environment)
    assert (told["db"]["exit_code"], short(told)) == (137, {"main": False, "db": True})
    found = account.look()["memory"]
    assert found["services"] == {"db": {"limit_bytes": 64 * MIB, "killed": {"agent": 1}}}
    assert environment.run("true", timeout_s=20).ok
    environment.run(f"{HOG}; true", timeout_s=30)
    assert short(services(environment)) == {"main": True, "db": True}
    assert environment.reset().clean
    assert short(services(environment)) == {"main": False, "db": False}


TEXT = """
services:
  main: {image: BASE}
  db:
    image: BASE
    command: [python3, -u, /srv/server.py]
    volumes: ["./server.py:/srv/server.py:ro", "kept:/data", /nameless]
    tmpfs: ["/fast:size=1m"]
    networks: {default: {aliases: [base, deep]}}
    healthcheck: {test: ["CMD", "python3", "-c", "CHECK"], interval: 30s, timeout: 5s, retries: 3}
volumes: {kept: }
""".replace("CHECK", "import urllib.request as u; u.urlopen('http://127.0.0.1')")

LISTENER = """
import os, socket, time
made = socket.create_server(("0.0.0.0", 4711))
if os.fork(): os._exit(0)
os.setsid()
for number in range(3): os.close(number)
time.sleep(4000)
"""
RESIDUES = {
    "a new file": ("echo x > /srv/residue", "ls -A /srv"),
    "a changed file": ("echo x >> /etc/issue", "cksum /etc/issue"),
    "a deleted file": ("rm /etc/issue.net", "ls /etc/issue*"),
    "a copy of the task's own file": ("echo x > /srv/server.py", "cksum /srv/server.py"),
    "a file in a volume": ("echo x >> /data/first; mkdir /data/.residue", "ls -A /data; cat /data/first"),
    "a file in a volume without a name": ("echo x > /nameless/residue", "ls -A /nameless"),
    "a file in memory": ("echo x > /fast/residue", "ls -A /fast"),
    "a file in shared memory": ("echo x > /dev/shm/residue", "ls -A /dev/shm"),
    "System V memory": ("ipcmk -M 4096", "tail -qn +2 /proc/sysvipc/shm | wc -l"),
    "names of hosts": ("echo 10.6.6.6 residue >> /etc/hosts", "grep residue /etc/hosts"),
    "a process": (
        "setsid sleep 4711 > /dev/null 2>&1 & sleep 0.5",
        "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o 'sleep 471[1]'",
    ),
    "a listening socket": (f"python3 - <<'CODE'\n{LISTENER}\nCODE", "grep -c ':1267 ' /proc/net/tcp"),
}
"""How each is planted in a service, and what looks otherwise when it is there."""


@pytest.fixture
def project(create: Create) -> ComposeEnvironment:
    return create(TEXT)


def look(project: ComposeEnvironment) -> dict[str, str]:
    peer = project.service("db")
    return {name: peer.run(look, timeout_s=20).stdout.decode() for name, (_, look) in RESIDUES.items()}


def test_nothing_that_a_task_left_in_another_service_is_there_after_a_reset(project: ComposeEnvironment) -> None:
    before, peer = look(project), project.service("db")
    for name, (plant, _) in RESIDUES.items():
        assert peer.run(plant, timeout_s=20).ok, name
    planted = look(project)
    assert [name for name in RESIDUES if planted[name] == before[name]] == [], "these could not have been found"
    proof = project.reset()
    assert (proof.clean, proof.left) == (True, ())
    assert look(project) == before


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
