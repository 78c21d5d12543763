"""What a reset leaves of the services beside the main one, and that tools are the main service's alone."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.environments.runtimes.compose.environment import ComposeEnvironment
from app.environments.runtimes.compose.provider import ComposeProvider
from app.environments.tools import tool_inside
from app.models.spec import EnvironmentKind
from app.settings import Settings
from tests.integration.test_compose_environment import ASK, STORED, spec_of, tags_of

pytestmark = pytest.mark.docker

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
def project(base_image_tag: str, tmp_path: Path) -> Iterator[ComposeEnvironment]:
    settings = Settings(home=tmp_path, installation=f"test-{uuid.uuid4().hex[:8]}")
    provider = ComposeProvider(settings, fetch_bundle=lambda bundle: STORED[bundle.sha256])
    made = provider.create(spec_of(TEXT.replace("BASE", base_image_tag)), tags_of(settings.installation), timeout_s=60)
    yield made
    made.destroy()


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


def test_its_names_lead_to_the_service_that_was_made_anew(project: ComposeEnvironment) -> None:
    def reached() -> dict[str, str]:
        return {name: project.run(ASK.replace("//db", f"//{name}"), timeout_s=20).text() for name in names}

    names = ("db", "base", "deep")
    before = {name: project.run(f"getent hosts {name}", timeout_s=20).text() for name in names}
    assert reached() == {"db": "x\n", "base": "x\n", "deep": "x\n"}
    project.service("db").run("printf changed > /data/first", timeout_s=20)
    assert set(reached().values()) == {"changed\n"}
    assert project.reset().clean
    assert set(reached().values()) == {"x\n"}
    after = {name: project.run(f"getent hosts {name}", timeout_s=20).text() for name in names}
    assert {name: one.split()[0] for name, one in after.items()} == {n: one.split()[0] for n, one in before.items()}
    assert project.run_in("db", "getent hosts main", timeout_s=20).ok


def test_the_main_service_alone_sees_a_tool_also_after_a_reset(
    base_image_tag: str, tmp_path: Path, docker_engine: str
) -> None:
    (tool := tmp_path / "toy-1").mkdir()
    (tool / "words").write_text("seen\n")
    settings = Settings(home=tmp_path / "home", installation=f"test-{uuid.uuid4().hex[:8]}")
    provider = ComposeProvider(settings, fetch_bundle=lambda bundle: STORED[bundle.sha256], tools=lambda name: tool)
    text = "services: {main: {image: BASE}, beside: {image: BASE, command: [sleep, '600']}}"
    spec = spec_of(text.replace("BASE", base_image_tag), tools=("toy",))
    place = tool_inside(EnvironmentKind.DOCKER, "toy", Path("/elsewhere"))
    environment = provider.create(spec, tags_of(settings.installation), timeout_s=90)
    try:
        for _ in range(2):
            assert environment.run(f"cat {place}/words", timeout_s=30).text() == "seen\n"
            assert not environment.run(f"touch {place}/more", timeout_s=30).ok
            assert not environment.service("beside").run(f"test -e {place}", timeout_s=30).ok
            assert environment.reset().clean
    finally:
        environment.destroy()
