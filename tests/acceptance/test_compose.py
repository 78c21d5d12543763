"""docker-compose.yml, really brought up: the demo dataset in both modes, the evidence in S3, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.artifacts import open_store
from app.artifacts.bundles import fetch_bundle, store_bundle
from app.datasets.base import Reading
from app.environments import provider_for
from app.environments.networks import firewall
from app.errors import MegaFlowError, UnknownName
from app.experience.http import HttpExperience
from app.models.spec import EnvironmentKind
from app.settings import PREFIX, Settings
from app.stack.engine import connected
from tests.acceptance.conftest import ROOT, build_image
from tests.services import free_port, missing, short_folder
from tests.unit.dataset_adapters import load

pytestmark = [pytest.mark.docker, pytest.mark.extra, pytest.mark.timeout(1500)]

PASSWORD = "not-a-secret"
TOKEN = "not-a-secret-token"
TASKS = 12


@dataclass(frozen=True)
class Deployment:
    command: tuple[str, ...]
    installation: str
    environment: dict[str, str]

    def run(self, *arguments: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command, *arguments],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )

    def megaflow(self, *arguments: str) -> Any:
        done = self.run("exec", "-T", "control", "megaflow", *arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def left(self) -> list[str]:
        """Containers, networks and volumes with this deployment's label."""
        with connected(Settings()) as client:
            chosen = {"label": f"megaflow={self.installation}"}
            found = [*client.api.containers(all=True, filters=chosen), *client.api.networks(filters=chosen)]
            return [one["Id"] for one in found] + [one["Name"] for one in client.api.volumes(filters=chosen)["Volumes"]]


@pytest.fixture(scope="module")
def images(base_image_tag: str) -> None:
    """The two images of the compose file, and the demo's task images, built by this host's own settings."""
    for script in ("worker-image", "services-image"):
        build_image(script, base_image_tag)
    with short_folder() as folder:
        settings = Settings(home=folder / "h")
        store = open_store(settings.artifacts())
        provider = provider_for(EnvironmentKind.DOCKER, settings, fetch_bundle=lambda one: fetch_bundle(store, one))
        for task in load("demo", Reading(pack=lambda one: store_bundle(store, one), kind=EnvironmentKind.DOCKER)):
            provider.prepare_image(task.environment, timeout_s=600)


@pytest.fixture(scope="module")
def deployment(images: None) -> Iterator[Deployment]:
    installation = f"test-{uuid.uuid4().hex[:8]}"
    foreign = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    wanted = {
        "INSTALLATION": installation,
        "POSTGRES_PASSWORD": uuid.uuid4().hex,
        "REDIS_PASSWORD": uuid.uuid4().hex,
        "AWS_ACCESS_KEY_ID": uuid.uuid4().hex,
        "AWS_SECRET_ACCESS_KEY": uuid.uuid4().hex,
        "FLOWER_PASSWORD": PASSWORD,
        "FLOWER_PORT": str(free_port()),
        "WEB_PORT": str(free_port()),
        "EXPERIENCE_TOKEN": TOKEN,
        "EXPERIENCE_PORT": str(free_port()),
        "EPHEMERAL_CAPACITY": "4",
        "COMPOSE_PROFILES": "model,agent,environment",
    }
    made = Deployment((*_compose_tool(), "-p", installation), installation, foreign | wanted)
    try:
        done = made.run("up", "-d")
        assert done.returncode == 0, done.stderr[-2000:]
        yield made
    finally:
        logs = made.run("logs", "--tail=40").stdout
        down = made.run("down", "-v", "-t", "20")
        _remove_open_network(installation)
        for one in made.left():
            print("left:", one)
        print(logs[-8000:])
    assert down.returncode == 0, down.stderr
    assert made.left() == []


def _remove_open_network(installation: str) -> None:
    """As docs/howto/cluster.md says: it is no part of the compose file."""
    with connected(Settings()) as client:
        ours = {"label": [f"megaflow={installation}", "megaflow.role=environment"]}
        for network in client.api.networks(filters=ours):
            client.api.remove_network(network["Id"])
    firewall.remove(installation)


def _compose_tool() -> tuple[str, ...]:
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ("docker", "compose")
    if shutil.which("docker-compose"):
        return ("docker-compose",)
    missing("a compose tool: apt-get install docker-compose, or see docs/howto/cluster.md")
    raise AssertionError


@pytest.mark.parametrize("mode", ["persistent", "ephemeral"])
def test_the_demo_dataset_is_solved_and_its_evidence_is_in_s3(deployment: Deployment, mode: str) -> None:
    found = deployment.megaflow("submit", "demo", "--agent", "oracle", "--mode", mode, "--wait", "--timeout", "200")
    rewards = {result["name"]: (result["verdict"] or {}).get("reward") for result in found["results"]}
    assert len(rewards) == TASKS
    wrong = {name: reward for name, reward in rewards.items() if reward != 1.0}
    told = {one["name"]: (one["verdict"] or {}).get("suspect") for one in found["results"]}
    assert not wrong, {name: told[name] for name in wrong}
    attempts = [attempt for result in found["results"] for attempt in result["attempts"]]
    kept = [artifact["url"] for attempt in attempts for artifact in attempt["artifacts"] if artifact["key"]]
    assert kept
    assert all(url.startswith("s3://megaflow/artifacts/runs/") for url in kept)
    assert _stored(deployment) >= set(kept)
    hosts = {attempt["instance_id"] for attempt in attempts}
    assert len(hosts) == (1 if mode == "persistent" else TASKS)


def _stored(deployment: Deployment) -> set[str]:
    """What the store itself says that it has."""
    program = (
        "import boto3, json, os; s3 = boto3.client('s3', endpoint_url=os.environ['MEGAFLOW_S3_ENDPOINT_URL']);"
        "pages = s3.get_paginator('list_objects_v2').paginate(Bucket='megaflow');"
        "print(json.dumps(['s3://megaflow/' + one['Key'] for page in pages for one in page['Contents']]))"
    )
    done = deployment.run("exec", "-T", "control", "python", "-c", program)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_an_agent_reaches_the_model_by_its_service_name(deployment: Deployment) -> None:
    wanted = ("--agent", "mini-swe-agent", "--model", "replay", "--task", "lost-settings", "--mode", "ephemeral")
    (result,) = deployment.megaflow("submit", "demo", *wanted, "--wait", "--timeout", "120")["results"]
    assert result["verdict"]["reward"] == 1.0
    assert result["end_reason"] == "submitted"


def test_flower_is_on_loopback_and_asks_for_the_password(deployment: Deployment) -> None:
    url = f"http://127.0.0.1:{deployment.environment['FLOWER_PORT']}/"
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, auth=("megaflow", PASSWORD)).status_code == 200
    published = deployment.run("port", "flower", "5555").stdout.strip()
    assert published.startswith("127.0.0.1:")


def test_samples_are_handed_out_on_loopback_to_who_has_the_token(deployment: Deployment) -> None:
    url = f"http://127.0.0.1:{deployment.environment['EXPERIENCE_PORT']}"
    assert deployment.run("port", "experience", "8767").stdout.startswith("127.0.0.1:")
    with pytest.raises(MegaFlowError, match="Authorization"):
        HttpExperience(url, "another", "latest", policy="p", consumer="trainer").next_batch(1)
    trainer = HttpExperience(url, TOKEN, "latest", policy="p", consumer="trainer")
    deployment.megaflow("submit", "demo", "--agent", "nop", "--task", "lost-settings", "--wait", "--timeout", "200")
    with pytest.raises(UnknownName, match="feeds no trainer"):
        trainer.next_batch(1)


def test_pages_are_on_loopback_and_ask_who_is_there(deployment: Deployment) -> None:
    url = f"http://127.0.0.1:{deployment.environment['WEB_PORT']}"
    assert deployment.run("port", "web", "8768").stdout.startswith("127.0.0.1:")
    assert httpx.get(f"{url}/runs").headers["location"].endswith("/sign-in?next=%2Fruns")
    link = deployment.megaflow("web")["link"]
    with httpx.Client(follow_redirects=True) as browser:
        page = browser.get(f"{url}/sign-in", params={"once": link.partition("once=")[2], "next": "/runs"})
        assert (page.status_code, "<h1>Runs</h1>" in page.text) == (200, True)


PORTS = (80, 5432, 5555, 6379, 8765, 8766, 8767, 8768, 9000, 2375)
PROBE = """import concurrent.futures, json, socket, sys
def answers(place):
    try:
        socket.create_connection(place, 2).close()
    except OSError:
        return False
    return True
places = json.loads(sys.argv[1])
with concurrent.futures.ThreadPoolExecutor(64) as threads:
    print(json.dumps([one for one, said in zip(places, threads.map(answers, map(tuple, places))) if said]))
"""


def _places(deployment: Deployment) -> list[tuple[str, int]]:
    """Every name and address of the control plane, and the host's on its network, with all ports that are in use."""
    with connected(Settings()) as client:
        chosen = {"label": [f"megaflow={deployment.installation}", "megaflow.role=service"]}
        networks = [one["NetworkSettings"]["Networks"] for one in client.api.containers(filters=chosen)]
        joined = [about for one in networks for about in one.values()]
    addresses = {about["IPAddress"] for about in joined} | {about["Gateway"] for about in joined}
    names = ("postgres", "redis", "s3", "gateway", "experience", "model", "flower", "control")
    return [(host, port) for host in (*names, *sorted(addresses)) for port in PORTS]


def test_no_service_of_the_control_plane_answers_an_open_task(deployment: Deployment, tmp_path: Path) -> None:
    places = json.dumps(_places(deployment))
    seen = deployment.run("exec", "-T", "control", "python", "-c", PROBE, places)
    reached = {tuple(one) for one in json.loads(seen.stdout)}
    services = {("postgres", 5432), ("redis", 6379), ("s3", 9000), ("gateway", 8766), ("model", 8765), ("flower", 5555)}
    services.add(("experience", 8767))
    assert reached >= services, "else the test below proves nothing"

    task = tmp_path / "look-around"
    shutil.copytree(ROOT / "app" / "datasets" / "demo" / "tasks" / "lost-settings", task)
    settings = task / "task.toml"
    settings.write_text(settings.read_text().replace("allow_internet = false", "allow_internet = true"))
    (task / "tests" / "probe.py").write_text(PROBE)
    test = f"""#!/bin/sh
mkdir -p "${{LOGS_DIR:-/logs}}/verifier"
found=$(python3 "${{TESTS_DIR:-/tests}}/probe.py" '{places}')
echo "reached: $found"
[ "$found" = "[]" ] && reward=1 || reward=0
echo $reward >"${{LOGS_DIR:-/logs}}/verifier/reward.txt"
"""
    (task / "tests" / "test.sh").write_text(test)
    control = deployment.run("ps", "-q", "control").stdout.strip()
    subprocess.run(["docker", "cp", str(task), f"{control}:/tmp/look-around"], check=True, capture_output=True)
    found = deployment.megaflow("submit", "/tmp/look-around", "--agent", "oracle", "--wait", "--timeout", "200")
    (result,) = found["results"]
    assert found["runs"][0]["open_networks"] == 1
    assert result["attempts"][-1]["environment"]["network"] == "open"
    assert (result["verdict"] or {}).get("reward") == 1.0, result


def test_services_have_no_more_rights_than_they_need(deployment: Deployment) -> None:
    for service in ("gateway", "experience", "beat", "flower", "redis", "s3"):
        done = deployment.run("exec", "-T", service, "sh", "-c", "grep -h -E '^(Uid|CapEff):' /proc/1/status; id -un")
        user, rights, name = done.stdout.splitlines()
        assert user.split()[1] != "0"
        assert int(rights.split()[1], 16) == 0
        assert name == ("redis" if service == "redis" else "megaflow")
    logs = deployment.run("logs").stdout
    assert "NOPERM" not in logs
    assert "Permission denied" not in logs
    bare = deployment.run("exec", "-T", "control", "python", "-c", BARE)
    assert bare.stdout.split() == ["NoPermissionError", "403"], bare.stderr


BARE = """import redis, urllib.error, urllib.request
try:
    redis.Redis("redis").get("x")
except redis.RedisError as error:
    print(type(error).__name__)
try:
    urllib.request.urlopen("http://s3:9000/megaflow")
except urllib.error.HTTPError as error:
    print(error.code)
"""


@pytest.mark.parametrize("name", ["FLOWER_PASSWORD", "REDIS_PASSWORD", "AWS_SECRET_ACCESS_KEY", "EXPERIENCE_TOKEN"])
def test_without_a_password_nothing_starts_and_its_name_is_said(deployment: Deployment, name: str) -> None:
    bare = {key: value for key, value in deployment.environment.items() if key != name}
    done = Deployment(deployment.command, deployment.installation, bare).run("config", "-q")
    assert done.returncode != 0
    assert "docs/howto/cluster.md" in done.stderr
