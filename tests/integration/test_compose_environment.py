"""Projects of several containers on a real engine: order, health, private networks, reset, and nothing left."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.artifacts.bundles import pack
from app.datasets.base import Reading
from app.environments.networks import firewall
from app.environments.networks.addresses import admissible
from app.environments.runtimes.auto import AutoProvider
from app.environments.runtimes.compose import resources as compose_resources
from app.environments.runtimes.compose.environment import ComposeEnvironment
from app.environments.runtimes.compose.provider import ComposeProvider
from app.environments.runtimes.compose.resources import shared
from app.environments.runtimes.oci import available
from app.environments.sweeper import Sweeper
from app.errors import (
    EngineUnavailable,
    EnvironmentFailed,
    EnvironmentOverLimit,
    GradingFailed,
    ServiceUnhealthy,
    SetupFailed,
)
from app.grading import grader_for
from app.grading.base import GradingInput
from app.host.engine import Engine
from app.models.hosts import AllowedHosts
from app.models.spec import (
    Bundle,
    Compose,
    EnvironmentSpec,
    Network,
    Resources,
    ScriptGoal,
    ServiceScript,
)
from app.settings import Settings
from megaflow.contract.environments.fixture import sweep_all, tar_of
from tests.integration.docker_fixture import engine, settings, tags_of
from tests.unit.dataset_adapters import load

__all__ = ["engine", "settings"]
pytestmark = pytest.mark.docker

STORED: dict[str, bytes] = {}
SMALL = Resources(cpus=1, memory_bytes=128 << 20, pids=128)

Create = Callable[..., ComposeEnvironment]

SERVER = """
import http.server, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("starting", flush=True)
time.sleep(float(os.environ.get("SLOW", "0")))
os.makedirs("/data", exist_ok=True)
os.chdir("/data")
open("/data/first", "a").write("x")
http.server.ThreadingHTTPServer(("", 80), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
SLEEP = "command: [sleep, '600']"
MIB = 1 << 20
DB = """
  db:
    image: BASE
    command: [python3, -u, /srv/server.py]
    volumes: ["./server.py:/srv/server.py:ro", "kept:/data"]
    healthcheck: {test: ["CMD", "python3", "-c", "CHECK"], interval: 30s, timeout: 5s, retries: 3}
""".replace("CHECK", "import urllib.request as u; u.urlopen('http://127.0.0.1')")
ASK = "python3 -c \"import urllib.request as u; print(u.urlopen('http://db/first', timeout=3).read().decode())\""


@pytest.fixture(scope="module")
def provider(settings: Settings, docker_engine: str) -> Iterator[ComposeProvider]:
    made = ComposeProvider(settings, fetch_bundle=lambda bundle: STORED[bundle.sha256])
    yield made
    sweep_all(settings)
    firewall.remove(settings.installation)


@pytest.fixture
def create(provider: ComposeProvider, base_image_tag: str, settings: Settings) -> Iterator[Create]:
    made = []

    def make(text: str, *, timeout_s: float = 60, deadline_s: float = 600, **fields: Any) -> ComposeEnvironment:
        spec = spec_of(text.replace("BASE", base_image_tag), **fields)
        made.append(provider.create(spec, tags_of(settings.installation, deadline_s), timeout_s=timeout_s))
        return made[-1]

    yield make
    for environment in made:
        environment.destroy()


def spec_of(text: str, **fields: Any) -> EnvironmentSpec:
    files = {"docker-compose.yaml": text.encode(), "server.py": SERVER.encode(), **fields.pop("files", {})}
    archive = tar_of(files)
    bundle = Bundle(sha256=hashlib.sha256(archive).hexdigest(), size_bytes=len(archive))
    STORED[bundle.sha256] = archive
    asked: dict[str, Any] = {"compose": Compose(context=bundle), "resources": SMALL, "workdir": "/", **fields}
    return EnvironmentSpec(**asked)


def left(engine: Engine, settings: Settings) -> list[str]:
    """Every object of this installation that stands on the engine."""
    ours = {"label": f"megaflow={settings.installation}"}
    return [
        *(found["Id"] for found in engine.api.containers(all=True, filters=ours)),
        *(found["Name"] for found in engine.api.networks(filters=ours)),
        *(found["Name"] for found in engine.api.volumes(filters=ours)["Volumes"] or ()),
    ]


def services(environment: ComposeEnvironment) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in environment.describe()["services"]}


def address(engine: Engine, container_id: str) -> str:
    networks = engine.api.inspect_container(container_id)["NetworkSettings"]["Networks"]
    return str(next(iter(networks.values()))["IPAddress"])


def reaches(environment: ComposeEnvironment, host: str, port: int) -> bool:
    script = f"import socket; socket.create_connection(('{host}', {port}), 2)"
    return environment.run(f'python3 -c "{script}"', timeout_s=20).ok


LOADED = (
    DB
    + """
  load:
    image: BASE
    command: [python3, -c, "open('/data/loaded', 'w').write('yes')"]
    volumes: ["kept:/data"]
    depends_on: {db: {condition: service_healthy}}
volumes: {kept: }
"""
)


def test_services_start_in_the_order_of_their_needs_and_the_agent_finds_them_ready(
    create: Create, engine: Engine
) -> None:
    begun = time.monotonic()
    needs = "{db: {condition: service_healthy}, load: {condition: service_completed_successfully}}"
    environment = create(f"services:\n  main: {{image: BASE, depends_on: {needs}}}{LOADED}")
    assert time.monotonic() - begun < 28, "the engine would look at its health for the first time after 30 s"
    assert environment.run(ASK, timeout_s=20).text() == "x\n"
    assert environment.run(ASK.replace("first", "loaded"), timeout_s=20).text() == "yes\n"
    told = services(environment)
    assert (told["db"]["state"], told["db"]["health"]) == ("running", "healthy")
    assert (told["load"]["state"], told["load"]["exit_code"]) == ("exited", 0)
    states = {name: engine.api.inspect_container(one["id"])["State"] for name, one in told.items()}
    assert states["db"]["StartedAt"] < states["load"]["StartedAt"]
    assert states["load"]["FinishedAt"] < states["main"]["StartedAt"]


@pytest.mark.parametrize(
    ("service", "complaints"),
    [
        ("command: [sh, -c, 'echo no licence >&2; exit 3']", ["'db' ended with exit code 3", "no licence"]),
        ("command: [no-such-program]", ["no-such-program"]),
        (
            "command: [sleep, '60'], "
            "healthcheck: {test: 'echo still cold; false', interval: 0.2s, timeout: 10s, retries: 2}",
            ["'db' is unhealthy", "still cold"],
        ),
        (
            "command: [sh, -c, 'echo warming up; sleep 60'], healthcheck: {test: 'echo cold; false', interval: 60s}",
            ["'db' was not healthy in time", "cold", "warming up"],
        ),
        ("command: [sleep, '60']", ["'db' has no health check"]),
    ],
    ids=["exits", "cannot start", "unhealthy", "deadline", "no check"],
)
def test_a_service_that_does_not_come_up_is_named_with_its_last_words_and_nothing_is_left(
    create: Create, engine: Engine, settings: Settings, service: str, complaints: list[str]
) -> None:
    needs = "depends_on: {db: {condition: service_healthy}}"
    if "exit" in service:
        needs = "depends_on: [db]"
    limit_s = 6 if "in time" in complaints[0] else 60
    with pytest.raises(ServiceUnhealthy) as caught:
        create(f"services: {{main: {{image: BASE, {needs}}}, db: {{image: BASE, {service}}}}}", timeout_s=limit_s)
    for part in complaints:
        assert part in str(caught.value)
    assert left(engine, settings) == []


def test_set_up_commands_run_when_all_services_are_ready(create: Create) -> None:
    text = f"services:\n  main: {{image: BASE}}{DB}volumes: {{kept: }}"
    environment = create(text, setup=(f"{ASK} > /prepared",))
    assert environment.get("/prepared") == b"x\n"
    proof = environment.reset()
    assert (proof.clean, "set-up" in proof.left[0]) == (False, True)
    with pytest.raises(SetupFailed, match="exit code 7: no luck"):
        create(text, setup=("echo no luck; exit 7",))


def test_the_main_service_runs_its_own_command_beside_the_agent_and_is_waited_for(create: Create) -> None:
    check = "{test: [CMD, test, -e, /tmp/up], interval: 1s, retries: 20}"
    command = "[sh, -c, 'sleep 0.5; echo of $$WHO; touch /tmp/up; sleep 60']"
    environment = create(
        f"services: {{main: {{image: BASE, environment: {{WHO: file}}, command: {command}, healthcheck: {check}}}}}",
        env={"WHO": "the task"},
    )
    running = environment.run("test -e /tmp/up && cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout_s=20)
    assert "sleep 60" in running.text()
    assert environment.logs() == {"main": b"of the task\n"}
    with pytest.raises(ServiceUnhealthy, match="'main' is unhealthy: never"):
        create("services: {main: {image: BASE, healthcheck: {test: 'echo never; false', interval: 0.2s, retries: 2}}}")


def test_services_are_built_from_their_own_folders_with_arguments_stage_and_copies(
    create: Create, provider: ComposeProvider, base_image_tag: str
) -> None:
    recipe = f"ARG BASE_IMAGE\nFROM ${{BASE_IMAGE}} AS one\nARG SAY\nRUN echo $SAY > /said\nFROM {base_image_tag}\n"
    files = {"web/Dockerfile": recipe.encode(), "conf/deep/a": b"copied", "vars": b"FROM_FILE=1\n"}
    text = """
services:
  main: {image: BASE, volumes: ["./conf:/etc/conf:ro"], hostname: front, shm_size: 32m, tmpfs: ["/fast:size=1m"]}
  web:
    build: {context: web, args: {SAY: "a $$b"}, target: one}
    env_file: vars
    user: "1234"
    working_dir: /tmp
    command: [sleep, "60"]
    volumes: ["./conf:/etc/conf:ro"]
"""
    environment = create(text, files=files)
    assert environment.run(
        "cat /etc/conf/deep/a; echo; hostname; df -k /dev/shm /fast | awk '{print $2}'", timeout_s=20
    ).text().split() == ["copied", "front", "1K-blocks", "32768", "1024"]
    told = environment.run_in("web", "cat /said /etc/conf/deep/a; echo $FROM_FILE; id -u; pwd", timeout_s=20)
    assert told.text().split() == ["a", "$b", "copied1", "1234", "/tmp"]
    spec = spec_of(text.replace("BASE", base_image_tag), files=files)
    identity = provider.prepare_image(spec, timeout_s=60)
    assert identity == provider.prepare_image(spec, timeout_s=60)
    other = spec_of(text.replace("BASE", base_image_tag).replace("/tmp", "/srv"), files=files)
    assert identity != provider.prepare_image(other, timeout_s=60)


def test_other_services_are_bounded_and_hardened_like_every_container(create: Create, engine: Engine) -> None:
    bounds = "mem_limit: 64m, pids_limit: 20, cpus: 0.5, cap_drop: [chown]"
    environment = create(
        f"services: {{main: {{image: BASE}}, db: {{image: BASE, command: [sleep, '60'], {bounds}}}, "
        "big: {image: BASE, command: [sleep, '60'], mem_limit: 64g, pids_limit: 99999, cpus: 64}}"
    )
    told = {name: engine.api.inspect_container(one["id"])["HostConfig"] for name, one in services(environment).items()}
    db, big = told["db"], told["big"]
    assert (db["Memory"], db["MemorySwap"], db["PidsLimit"], db["NanoCpus"]) == (64 << 20, 64 << 20, 20, 500_000_000)
    assert (big["Memory"], big["PidsLimit"], big["NanoCpus"]) == (SMALL.memory_bytes, SMALL.pids, 1_000_000_000)
    assert (db["SecurityOpt"], db["Privileged"], db["IpcMode"]) == (["no-new-privileges"], False, "private")
    assert {"MKNOD", "NET_RAW", "CHOWN"} <= set(db["CapDrop"])
    assert "CHOWN" not in big["CapDrop"]
    assert big["PortBindings"] in (None, {})


def test_files_cannot_loosen_what_holds_for_every_container(create: Create) -> None:
    asked = "ulimits: {core: -1, nofile: {soft: -1, hard: -1}}"
    environment = create(f"services: {{main: {{image: BASE, {asked}}}, db: {{image: BASE, {SLEEP}, {asked}}}}}")
    for service in ("main", "db"):
        told = environment.run_in(service, "ulimit -Hc; ulimit -Hn", timeout_s=20).text().split()
        assert told[0] == "0"
        assert 1 << 14 <= int(told[1]) <= 1 << 20
    plain = create(f"services: {{main: {{image: BASE}}, db: {{image: BASE, {SLEEP}}}}}")
    assert plain.run_in("db", "ulimit -c; ulimit -Hc", timeout_s=20).text() == "0\n0\n"


FILL = "dd if=/dev/zero of={place}/fill bs=1M count=96 2>/dev/null; sync; sleep 30"
KEEPS = (
    f"services: {{main: {{image: BASE}}, db: {{image: BASE, {SLEEP}, volumes: ['kept:/data']}}}}\nvolumes: {{kept: }}"
)


@pytest.mark.parametrize(("service", "place"), [("db", "/data"), ("main", "/srv")], ids=["volume", "main"])
def test_a_project_that_writes_more_than_its_task_may_is_ended_and_told(
    create: Create, engine: Engine, service: str, place: str
) -> None:
    environment = create(KEEPS, resources=SMALL.model_copy(update={"disk_bytes": 64 * MIB}))
    peer = environment.service("db")
    with pytest.raises(EnvironmentOverLimit, match="disk limit of 67108864 bytes reached"):
        environment.run_in(service, FILL.format(place=place), timeout_s=60)
    uses: list[Callable[[], object]] = [
        lambda: environment.run("true", timeout_s=5),
        lambda: environment.service("db"),
        lambda: peer.run("true", timeout_s=5),
    ]
    for use in uses:
        with pytest.raises(EnvironmentOverLimit, match="disk limit"):
            use()
    assert not environment.reset().clean
    ids, give_up = environment.created_resources().containers, time.monotonic() + 20
    while any(engine.api.inspect_container(one)["State"]["Running"] for one in ids):
        assert time.monotonic() < give_up
        time.sleep(0.05)


PAIR = f"services:\n  main: {{image: BASE}}{DB}volumes: {{kept: }}"


@pytest.mark.extra
def test_two_projects_do_not_see_each_other_nor_anything_else(create: Create, engine: Engine) -> None:
    one, two = create(PAIR), create(PAIR)
    other = address(engine, services(two)["db"]["id"])
    assert reaches(two, other, 80)
    assert not reaches(one, other, 80)
    begun = time.monotonic()
    assert not one.run("getent hosts example.org", timeout_s=20).ok
    assert time.monotonic() - begun < 5  # refused, not waited for
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        assert not any(reaches(two, host, port) for host in (other.rsplit(".", 1)[0] + ".1", *hosts_own_addresses()))


def hosts_own_addresses() -> set[str]:
    """Where programs of this host listen when they listen everywhere."""
    found = {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    return {one for one in found | {"172.17.0.1"} if not one.startswith("127.")}


def test_an_open_network_leads_outside_but_to_nothing_private_and_an_internal_one_of_the_file_never_does(
    create: Create, engine: Engine, settings: Settings
) -> None:
    text = PAIR.replace("{image: BASE}", "{image: BASE, networks: [default, inner]}", 1)
    text += "\nnetworks: {inner: {internal: true}}"
    environment = create(
        text.replace("healthcheck", "networks: {default: {aliases: [base]}, inner: }\n    healthcheck"),
        network=Network.OPEN,
    )
    networks = engine.api.networks(filters={"label": f"megaflow.instance={environment._resources.tags.instance_id}"})
    assert {one["Name"].rpartition("-")[2]: one["Internal"] for one in networks} == {"default": False, "inner": True}
    assert environment.run(ASK.replace("//db", "//base"), timeout_s=20).text() == "x\n"
    with socket.create_server(("0.0.0.0", 0)) as server:
        gateway = next(one["IPAM"]["Config"][0]["Gateway"] for one in networks if not one["Internal"])
        assert not reaches(environment, gateway, server.getsockname()[1])
        allowing = settings.model_copy(update={"open_network_allow": (str(compose_resources.RANGE),)})
        bridge = next(one["Options"]["com.docker.network.bridge.name"] for one in networks if not one["Internal"])
        firewall.ensure(engine, allowing, settings.installation, bridge)
        assert reaches(environment, gateway, server.getsockname()[1])


def test_grading_may_look_at_every_service_and_its_log(create: Create) -> None:
    environment = create(PAIR)
    environment.run(ASK, timeout_s=20)
    assert environment.services == ("main", "db")
    assert environment.service("db").get("/data/first") == b"x"
    assert environment.run_in("main", "hostname", timeout_s=20).ok
    result = environment.run_in("db", "echo out; echo err >&2; exit 4", timeout_s=20)
    assert (result.exit_code, result.stdout, result.stderr) == (4, b"out\n", b"err\n")
    assert environment.logs()["db"].startswith(b"starting\n")
    with pytest.raises(EnvironmentFailed, match="no service 'nobody' in this environment; known: main, db"):
        environment.run_in("nobody", "true", timeout_s=5)


def test_a_reset_makes_the_whole_project_anew_and_says_so(create: Create, engine: Engine, settings: Settings) -> None:
    environment = create(PAIR.replace("{image: BASE}", "{image: BASE, volumes: ['./server.py:/given:ro']}", 1))
    before = services(environment)
    environment.run("touch /residue; rm /given; sleep 600 >/dev/null 2>&1 &", timeout_s=20)
    environment.run_in("db", "echo more >> /data/first; touch /tmp/residue", timeout_s=20)
    proof = environment.reset()
    assert (proof.clean, proof.left) == (True, ())
    after = services(environment)
    assert after["main"]["id"] == before["main"]["id"]
    assert after["db"]["id"] != before["db"]["id"]
    assert not environment.run("ls /residue", timeout_s=20).ok
    assert environment.get("/given") == SERVER.encode()
    assert environment.run(ASK, timeout_s=20).text() == "x\n"
    assert not environment.run_in("db", "ls /tmp/residue", timeout_s=20).ok
    environment.adopt(tags := tags_of(settings.installation))
    environment._await_name()
    names = {one["Names"][0] for one in engine.api.containers(filters={"label": f"megaflow={settings.installation}"})}
    assert all(str(tags.attempt_id) in name for name in names)
    assert environment.describe()["origin"] == "recycled"


def test_a_reset_that_fails_is_not_called_clean(create: Create) -> None:
    text = "services: {main: {image: BASE}, db: {image: BASE, command: [sleep, '60']}}"
    environment = create(text, timeout_s=60)
    environment._others["db"].image_id = "sha256:" + "0" * 64
    proof = environment.reset()
    assert not proof.clean
    assert "is gone" in proof.left[0]


def test_an_end_leaves_nothing_also_twice_and_from_another_thread(
    create: Create, engine: Engine, settings: Settings
) -> None:
    environment = create(PAIR.replace('"kept:/data"', '"kept:/data", /anonymous'))
    things = environment.created_resources()
    assert (len(things.containers), len(things.networks), len(things.volumes)) == (2, 1, 2)
    assert environment.id in things.containers
    running = ThreadPoolExecutor(1).submit(environment.run, "sleep 60", timeout_s=90)
    time.sleep(0.3)
    begun = time.monotonic()
    ends = [threading.Thread(target=environment.destroy) for _ in range(3)]
    for one in ends:
        one.start()
    for one in ends:
        one.join(30)
    with pytest.raises(EnvironmentFailed):
        running.result(10)
    assert time.monotonic() - begun < 8  # its server ignores SIGTERM: no grace of 10 s was given
    assert left(engine, settings) == []
    assert not {one["Name"] for one in engine.api.volumes()["Volumes"] or ()} & set(things.volumes)
    environment.destroy()
    assert {one["state"] for one in environment.describe()["services"]} == {"removed"}
    with pytest.raises(EnvironmentFailed):
        environment.run_in("db", "true", timeout_s=5)


def test_what_a_killed_worker_left_is_removed_by_its_labels(create: Create, engine: Engine, settings: Settings) -> None:
    kept, lost = create(PAIR), create(PAIR)
    living, ended = (one._resources.tags.instance_id for one in (kept, lost))
    instance = {"label": f"megaflow.instance={ended}"}
    assert len(engine.api.containers(all=True, filters=instance)) == 2
    assert len(engine.api.networks(filters=instance)) == 1
    assert len(engine.api.volumes(filters=instance)["Volumes"]) == 1
    assert Sweeper(settings).sweep({living}, ended={ended}).removed == 4
    assert kept.run(ASK, timeout_s=20).text() == "x\n"
    of_kept = {one.id for one in shared(engine, settings.installation)}
    assert of_kept == {*kept.created_resources().networks, *kept.created_resources().volumes}
    assert [one.remove(engine) for one in shared(engine, settings.installation)] == [False, False]  # in use
    for container in kept.created_resources().containers:
        engine.remove(container)
    assert [one.remove(engine) for one in shared(engine, settings.installation)] == [True, True]
    kept.destroy()
    assert left(engine, settings) == []


SHOP = """
import http.server
class Shop(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        open("/sold", "a").write(self.path + "\\n")
        self.send_response(200)
        self.end_headers()
http.server.ThreadingHTTPServer(("", 80), Shop).serve_forever()
"""
JUDGED_BY_BOTH = {
    "task.toml": '[verifier]\nservice = ["main", "shop"]\n[environment]\nallow_internet = false\nmemory_mb = 128\n',
    "instruction.md": "Buy apples, and keep the bill in /bill.\n",
    "environment/docker-compose.yaml": """
services:
  main: {image: BASE, working_dir: /, depends_on: {shop: {condition: service_healthy}}}
  shop:
    image: BASE
    command: [python3, -u, /srv/shop.py]
    volumes: ["./shop.py:/srv/shop.py:ro"]
    healthcheck: {test: ["CMD", "python3", "-c", "import socket; socket.create_connection(('127.0.0.1', 80))"]}
""",
    "environment/shop.py": SHOP,
    "tests/test.sh": """
[ -f /bill ] && grep -q 'GET /apples' /logs/services/shop.log && found=1
ls -l /logs/services
echo ${found:-0} >/logs/verifier/reward.txt
""",
    "tests/shop/test.sh": "touch /sold; grep -cx /apples /sold >/logs/verifier/reward.txt\n",
}
BUY = "python3 -c \"import urllib.request as u; u.urlopen('http://shop/apples', timeout=5)\""


def test_main_and_a_service_beside_it_judge_one_task(settings: Settings, base_image_tag: str, tmp_path: Path) -> None:
    for name, text in JUDGED_BY_BOTH.items():
        (file := tmp_path / "buy-apples" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("BASE", base_image_tag))

    def keep(folder: Path) -> Bundle:
        bundle, STORED[bundle.sha256] = pack(folder)
        return bundle

    [task] = load(str(tmp_path / "buy-apples"), Reading(pack=keep))
    assert isinstance(task.goal, ScriptGoal)
    provider = AutoProvider(settings, fetch_bundle=lambda bundle: STORED[bundle.sha256])
    submission = GradingInput(task, None, STORED[task.goal.tests.sha256])
    environment = provider.create(task.environment, tags_of(settings.installation), timeout_s=60)
    try:
        environment.put("/bill", b"")
        environment.put("/logs/services/shop.log", b"GET /apples, says the agent")
        grade = grader_for(task.goal).grade(submission, environment)
        assert grade.verdict.metrics == {"main.reward": 0.0, "shop.reward": 0.0, "reward": 0.0}
        assert environment.run(f"{BUY}; rm /bill", timeout_s=20).ok
        grade = grader_for(task.goal).grade(submission, environment)
        assert grade.verdict.metrics == {"main.reward": 0.0, "shop.reward": 1.0, "reward": 0.0}
        environment.put("/bill", b"")
        grade = grader_for(task.goal).grade(submission, environment)
        assert grade.verdict.reward == 1.0
        assert grade.verdict.detail.endswith("gave: main 1, shop 1")
        assert grade.report.count(b"-r--r--r--") == 2
        both = task.goal.model_copy(update={"also": (ServiceScript(service="till", command="true"),)})
        with pytest.raises(GradingFailed, match="the service 'till', in which the tests are to run; found main, shop"):
            grader_for(both).grade(submission, environment)
    finally:
        environment.destroy()


def test_an_open_network_without_an_engine_is_refused_with_a_word_on_it(settings: Settings) -> None:
    nowhere = settings.model_copy(update={"docker_url": "unix:///nonexistent/docker.sock"})
    provider = AutoProvider(nowhere, fetch_bundle=lambda bundle: b"")
    spec = EnvironmentSpec(image="x", network=Network.OPEN)
    expected = r"^x asks for the network `open`, which takes an engine: no container engine answers .*megaflow up"
    with pytest.raises(EngineUnavailable, match=expected):
        provider.prepare_image(spec, timeout_s=5)
    with pytest.raises(EngineUnavailable, match=expected) as found:
        provider.create(spec, tags_of(settings.installation), timeout_s=5)
    assert ("`allowlist` takes none" in str(found.value)) == (available(nowhere) is None)


def test_a_service_that_fills_the_disk_while_it_starts_is_ended_too(
    create: Create, engine: Engine, settings: Settings
) -> None:
    fills = f"command: [sh, -c, '{FILL.format(place='/srv')}'], healthcheck: {{test: 'false', interval: 60s}}"
    needs = "depends_on: {db: {condition: service_healthy}}"
    with pytest.raises(EnvironmentOverLimit, match="disk limit"):
        create(
            f"services: {{main: {{image: BASE, {needs}}}, db: {{image: BASE, {fills}}}}}",
            resources=SMALL.model_copy(update={"disk_bytes": 64 * MIB}),
            timeout_s=40,
        )
    assert left(engine, settings) == []


def test_a_main_service_with_a_volume_is_never_called_clean(create: Create) -> None:
    environment = create("services: {main: {image: BASE, volumes: ['kept:/data']}}\nvolumes: {kept: }")
    assert not environment.reset().clean


def test_an_end_in_the_middle_of_a_reset_leaves_nothing(create: Create, engine: Engine, settings: Settings) -> None:
    environment = create(
        "services: {main: {image: BASE}, db: {image: BASE, command: [sleep, '60'], network_mode: none}}"
    )
    start_again = environment._start_again

    def ended_before_they_start(deadline: float) -> None:
        environment.destroy()
        start_again(deadline)

    environment._start_again = ended_before_they_start
    assert not environment.reset().clean
    assert left(engine, settings) == []


def test_what_main_wrote_is_kept_by_its_end_however_much_it_is(create: Create) -> None:
    lots = "command: [sh, -c, 'echo begun; yes | head -c 6000000; echo done; touch /up; sleep 60']"
    environment = create(f"services: {{main: {{image: BASE, {lots}, healthcheck: {{test: test -e /up}}}}}}")
    found = environment.logs()["main"]
    assert len(found) == 2 << 20
    assert found.endswith(b"y\ndone\n")
    environment.run("rm /var/tmp/.service.log; mkfifo /var/tmp/.service.log", timeout_s=20)
    assert environment.logs() == {}


def test_a_projects_addresses_are_no_public_ones() -> None:
    """An allowed name that leads to one is refused as one that leads to any other machine of ours."""
    for one in (compose_resources.RANGE[1], compose_resources.RANGE[-2]):
        assert not admissible(one, "example.org", 443, AllowedHosts(("example.org",)))
