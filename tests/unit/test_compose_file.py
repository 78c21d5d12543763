"""Compose files: what is read, what is refused, and that everything refused is named at once."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.artifacts.bundles import pack
from app.compose_file import plan
from app.compose_file.build_context import adapted
from app.compose_file.file import MAX_SERVICES, Project, read_project
from app.compose_file.model import Condition, ServiceBuild, ServiceLimits
from app.compose_file.mounts import MountKind, ServiceMount
from app.compose_file.plan import context_of
from app.compose_file.refusals import REFUSED
from app.compose_file.values import idle
from app.datasets.base import Reading
from app.errors import DatasetInvalid, SpecInvalid
from app.models.spec import Bundle, Network, Resources
from tests.unit.dataset_adapters import load


def written(folder: Path, text: str, **files: str) -> Path:
    named = {name.replace("__", "/"): content for name, content in files.items()}
    return write_files(folder, {"docker-compose.yaml": text, **named})


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def read(folder: Path, text: str, **files: str) -> Project:
    return read_project(written(folder, text, **files))


def refusal(folder: Path, tree: Any) -> str:
    with pytest.raises(SpecInvalid) as caught:
        read(folder, yaml.safe_dump(tree))
    return str(caught.value)


def service(**keys: Any) -> dict[str, Any]:
    """A file with one good service, and these keys in it."""
    return {"services": {"main": {"image": "example:1", **keys}}}


RICH = """
name: shop
x-shared: &shared
  restart: always
  logging: {driver: syslog}
services:
  main:
    <<: *shared
    build:
      context: ./app
      dockerfile: Recipe
      args: [BASE=a b, FLAG]
      target: last
    command: sh -c 'sleep infinity'
    environment: ["MODE=${MODE:-test}", EMPTY=, UNSET, PRICE=5$$]
    env_file: ./app/vars
    working_dir: /srv
    user: "1000:1000"
    hostname: front
    depends_on:
      db: {condition: service_healthy, restart: true}
      load: {condition: service_completed_successfully}
    networks: {inner: {aliases: [web]}, default: }
    volumes:
      - ./app/vars:/etc/vars:ro
      - kept:/kept
      - /scratch
      - {type: tmpfs, target: /fast, tmpfs: {size: 64m}}
      - ${HOST_AGENT_LOGS_PATH}:${ENV_AGENT_LOGS_PATH}
    tmpfs: /run:size=1m
    ports: ["8080:80", {target: 90, published: 9000}]
    expose: [70]
    cap_drop: [all]
    security_opt: [no-new-privileges:true]
    ulimits: {nofile: {soft: 1024, hard: 2048}, nproc: 64}
    shm_size: 128mb
    stop_signal: SIGINT
    init: true
  db:
    image: db:1
    command: ["serve", "--port", 5432]
    entrypoint: /entry.sh --fast
    environment: {DEBUG: true, LEVEL: 3}
    healthcheck: {test: ready -q, interval: 1m30s, timeout: 500ms, start_period: 2s, retries: "5"}
    networks: [inner]
    deploy: {resources: {limits: {cpus: "0.5", memory: 256M, pids: 50}, reservations: {memory: 1G}}}
    mem_limit: 512m
    cpus: 2
  load:
    image: load:1
    healthcheck: {disable: true}
    depends_on: [db]
    network_mode: none
  debug:
    image: debug:1
    profiles: [debug]
networks:
  inner: {internal: true, driver: bridge}
volumes: {kept: , unused: {driver: local}}
"""


@pytest.fixture
def rich(tmp_path: Path) -> Project:
    recipe = "ARG BASE=x\nFROM scratch AS first\nFROM first AS last\nFROM first\n"
    return read(tmp_path, RICH, app__Recipe=recipe, app__vars="# kept\nexport A='1'\nMODE=file\n")


def test_what_a_service_is_made_of_is_read(rich: Project) -> None:
    main = rich.services["main"]
    assert main.build == ServiceBuild(context="app", dockerfile="Recipe", args={"BASE": "a b"}, target="last")
    assert main.command == ("sh", "-c", "sleep infinity")
    assert main.variables == {"A": "1", "MODE": "test", "EMPTY": "", "PRICE": "5$"}
    assert (main.working_dir, main.user, main.hostname, main.init) == ("/srv", "1000:1000", "front", True)
    assert (main.shm_size, main.cap_drop) == (128 << 20, ("ALL",))


def test_numbers_and_flags_become_the_texts_that_their_author_means(rich: Project) -> None:
    db = rich.services["db"]
    assert db.command == ("serve", "--port", "5432")
    assert db.entrypoint == ("/entry.sh", "--fast")
    assert db.variables == {"DEBUG": "true", "LEVEL": "3"}


def test_health_checks_and_bounds_are_read_with_their_units(rich: Project) -> None:
    check = rich.services["db"].healthcheck
    assert check is not None
    assert check.test == ("CMD-SHELL", "ready -q")
    assert (check.interval, check.timeout, check.start_period, check.retries) == (90.0, 0.5, 2.0, 5)
    assert rich.services["db"].limits == ServiceLimits(0.5, 256 << 20, 50)
    off = rich.services["load"].healthcheck
    assert off is not None
    assert off.disabled


def test_needs_and_networks_are_read_in_both_notations(rich: Project) -> None:
    assert rich.waits_for("main") == {"db": Condition.HEALTHY, "load": Condition.COMPLETED}
    assert rich.waits_for("load") == {"db": Condition.STARTED}
    assert rich.awaited("db") == {Condition.HEALTHY, Condition.STARTED}
    assert rich.networks == {"default": False, "inner": True}
    assert rich.services["main"].aliases == {"inner": ("web",), "default": ()}
    assert rich.together("inner") == ["main", "db"]
    assert rich.services["load"].aliases == {}


def test_a_service_is_near_itself_and_those_on_its_networks_by_all_their_names(rich: Project, tmp_path: Path) -> None:
    assert set(rich.near("main")) == {"main", "front", "web", "db"}
    assert set(rich.near("db")) == {"db", "main", "front", "web"}
    assert rich.near("load") == ("load",)
    hosts = ["here.test:127.0.0.1", "six.test:[::1]", "far.test:10.1.2.3"]
    alone = read(tmp_path, yaml.safe_dump(service(extra_hosts=hosts, hostname="front", network_mode="none")))
    assert alone.near("main") == ("main", "here.test", "six.test", "front")


def test_mounts_are_volumes_copies_and_memory_and_never_the_hosts(rich: Project) -> None:
    assert rich.services["main"].mounts == (
        ServiceMount(MountKind.COPY, "/etc/vars", "app/vars", True),
        ServiceMount(MountKind.NAMED, "/kept", "kept"),
        ServiceMount(MountKind.ANONYMOUS, "/scratch"),
        ServiceMount(MountKind.TMPFS, "/fast", size_bytes=64 << 20),
        ServiceMount(MountKind.FOLDER, "/logs/agent"),
        ServiceMount(MountKind.TMPFS, "/run", size_bytes=1 << 20),
    )
    assert rich.volumes == ("kept",)


def test_what_is_passed_over_is_noted(rich: Project) -> None:
    noted = "\n".join(rich.notes)
    for place in ("main.restart", "main.logging", "main.ports", "main.environment.UNSET", "services.debug"):
        assert place in noted
    assert "debug" not in rich.services


def test_a_profile_is_started_when_somebody_needs_it(tmp_path: Path) -> None:
    tree = service(depends_on=["extra"])
    tree["services"]["extra"] = {"image": "x", "profiles": ["more"]}
    assert list(read(tmp_path, yaml.safe_dump(tree)).services) == ["extra", "main"]  # the file's order


def test_a_service_may_name_the_image_that_another_one_builds(tmp_path: Path) -> None:
    text = "services: {main: {build: ., image: '${MAIN_IMAGE_NAME}'}, twin: {image: '${MAIN_IMAGE_NAME}'}}"
    project = read(tmp_path, text, Dockerfile="FROM scratch\n")
    assert project.services["twin"].build == project.services["main"].build == ServiceBuild()


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("$UNSET", ""),
        ("${UNSET}", ""),
        ("${UNSET:-a}", "a"),
        ("${UNSET-a}", "a"),
        ("${CPUS:-1}", "1"),
        ("${CPUS-1}", ""),
        ("${TEST_DIR:-x}", "/tests"),
        ("${TEST_DIR}/a$$b", "/tests/a$b"),
        ("${UNSET:-${TEST_DIR:-x}}", "/tests"),
        ("${TEST_DIR:+yes}", "yes"),
        ("${UNSET:+yes}", ""),
    ],
)
def test_variables_have_the_harnesses_values_and_none_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, becomes: str
) -> None:
    monkeypatch.setenv("UNSET", "of the host")
    project = read(tmp_path, yaml.safe_dump(service(hostname="h", environment={"V": text})))
    assert project.services["main"].variables["V"] == becomes


@pytest.mark.parametrize("text", ["${", "${A", "${1}", "a$", "${A:?needed}", "${A%b}"])
def test_a_malformed_or_demanded_variable_is_refused(tmp_path: Path, text: str) -> None:
    assert "services.main.environment.V" in refusal(tmp_path, service(environment={"V": text}))


ASKED: dict[str, Any] = {
    "gpus": "all",
    "devices": ["/dev/kvm:/dev/kvm"],
    "privileged": True,
    "configs": ["a"],
    "secrets": ["a"],
    "group_add": ["docker"],
    "pid": "host",
    "uts": "host",
}
"""Likely values; anything else asks with `x`."""
KEYS = [
    *((("services", "S", key), ASKED.get(key, "x")) for key in REFUSED["service"]),
    *((("services", "S", "build", key), "x") for key in REFUSED["build"]),
    *(((key,), "x") for key in REFUSED["file"]),
    (("services", "S", "network_mode"), "host"),
    (("services", "S", "network_mode"), "service:other"),
    (("services", "S", "ipc"), "host"),
    (("services", "S", "security_opt"), ["seccomp:unconfined"]),
    (("services", "S", "extra_hosts"), ["up:host-gateway"]),
    (("services", "S", "volumes"), ["/var/run/docker.sock:/var/run/docker.sock"]),
    (("services", "S", "volumes"), ["/:/host:ro"]),
    (("services", "S", "volumes"), ["~/.ssh:/keys:ro"]),
    (("services", "S", "volumes"), ["../outside:/x:ro"]),
    (("services", "S", "volumes"), ["./inside:/x"]),
    (("services", "S", "volumes"), ["./missing:/x:ro"]),
    (("services", "S", "volumes"), ["undeclared:/x"]),
    (("services", "S", "volumes"), [{"type": "bind", "source": "/etc", "target": "/x", "read_only": True}]),
    (("services", "S", "volumes"), [{"type": "npipe", "source": "a", "target": "/x"}]),
    (
        ("services", "S", "volumes"),
        [{"type": "bind", "source": ".", "target": "/x", "bind": {"propagation": "shared"}}],
    ),
    (("services", "S", "volumes"), ["/proc/sys"]),
    (("services", "S", "tmpfs"), ["/"]),
    (("services", "S", "deploy"), {"replicas": 3}),
    (("services", "S", "deploy"), {"resources": {"reservations": {"devices": [{"driver": "nvidia"}]}}}),
    (("services", "S", "networks"), {"default": {"ipv4_address": "10.0.0.2"}}),
    (("services", "S", "networks"), ["undeclared"]),
    (("services", "S", "depends_on"), ["nobody"]),
    (("services", "S", "a_key_that_nobody_knows"), 1),
    (("services", "S", "healthcheck"), {"test": ["sh", "x"]}),
    (("networks", "a/b"), {"internal": True}),
    (("volumes", "a b"), {}),
    (("networks", "n", "external"), True),
    (("networks", "n", "driver"), "host"),
    (("networks", "n", "driver_opts"), {"com.docker.network.bridge.name": "docker0"}),
    (("networks", "n", "ipam"), {"config": [{"subnet": "10.0.0.0/8"}]}),
    (("volumes", "v", "external"), {"name": "theirs"}),
    (("volumes", "v", "driver_opts"), {"type": "none", "o": "bind", "device": "/"}),
    (("volumes", "v", "driver"), "nfs"),
]
"""A place (S: any service) and a value that no task may ask for."""


@pytest.mark.parametrize(("place", "value"), KEYS, ids=lambda one: ".".join(one) if isinstance(one, tuple) else None)
def test_what_a_task_may_not_have_is_refused_by_name(tmp_path: Path, place: tuple[str, ...], value: Any) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    tree: dict[str, Any] = {"services": {"main": {"build": {"context": "."}}}}
    where = put(tree, place, value, "main")
    message = refusal(tmp_path, tree)
    assert f"- {where}" in message
    assert "expected" in message
    assert "found" in message


def put(tree: dict[str, Any], place: tuple[str, ...], value: Any, name: str) -> str:
    """Write the value there; where that is, as messages say it."""
    where = [name if part == "S" else part for part in place]
    at = tree
    for part in where[:-1]:
        at = at.setdefault(part, {})
    at[where[-1]] = value
    return ".".join(where)


def test_harmless_values_of_refused_keys_are_no_reason(tmp_path: Path) -> None:
    keys = {"privileged": False, "cap_add": [], "devices": None, "network_mode": "none", "ipc": "private", "x-own": 1}
    assert read(tmp_path, yaml.safe_dump(service(**keys))).services["main"].image == "example:1"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[", "expected YAML"),
        ("- a", "a map with `services`; found a list"),
        ("services: []", "a map with `services`"),
        ("services: {main: !!python/object/apply:os.system [true]}", "expected YAML"),
        ("services: {other: {image: x}}", "the service 'main', in which the agent acts; found 'other'"),
        ("services: {main: {command: x}}", "`image` or `build`"),
        ("services: {main: {image: x, depends_on: [a]}, a: {image: x, depends_on: [main]}}", "a circle of a, main"),
        ("services: {main: {image: x, mem_limit: lots}}", "a size such as 512m"),
        ("services: {main: {image: x, cpus: -1}}", "a number above zero"),
        (f"services: {{main: {{image: x, mem_limit: {'9' * 400}b}}}}", "a size below an exbibyte"),
        (f"services: {{main: {{image: x, env_file: {'a' * 300}}}}}", "File name too long"),
        (f"services: {{main: {{image: x, volumes: [./{'a' * 300}:/x:ro]}}}}", "File name too long"),
        (f"services: {{main: {{image: x, command: '{'${A:-' * 1500}{'}' * 1500}'}}}}", "`${NAME}`"),
        (f"services: {{main: {{image: x, command: '{'$ ' * 300_000}'}}}}", "in 1 place(s)"),
        (
            f"x-a: &a '{'$$' * 200_000}'\nx-b: [{', '.join(['*a'] * 30)}]\nservices: {{main: {{image: x}}}}",
            "characters",
        ),
        ("services: {main: {image: x, healthcheck: {test: a, interval: soon}}}", "a time such as 5s"),
        ("services: {main: {image: x, init: perhaps}}", "true or false"),
        ("services: {main: {image: x, volumes: here}}", "services.main.volumes: expected a list; found 'here'"),
        ("services: {main: {image: x, healthcheck: {tset: a}}}", "main.healthcheck.tset: expected a key that we know"),
        ("services: {main: {image: x, deploy: {resources: {limits: {cpus: a}}}}}", "limits.cpus: expected a number"),
        ("services: {main: {image: x, name: y}}", "services.main.name: expected a key that we know; found 'y'; leave"),
        ("services: {main: {image: x, command: {a: b}}}", "services.main.command: expected a text or a list of words"),
        ("services: {main: {image: x, command: 'a \"b'}}", "words that a shell can split"),
        ("services: {main: {build: ../out}}", "a folder of the context"),
        ("services: {main: {build: 'https://example.org/a.git'}}", "a folder of the context"),
        ("services: {main: {build: {context: ., dockerfile: None}}}", "a file in the build's folder"),
        (
            "services: {main: {image: x}, w: {image: x, "
            "depends_on: {main: {condition: service_completed_successfully}}}}",
            "does not end",
        ),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_the_reason(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(SpecInvalid) as caught:
        read(tmp_path, text)
    assert complaint in str(caught.value)


def test_a_file_outside_of_the_context_is_not_read(tmp_path: Path) -> None:
    written(tmp_path, "services: {main: {image: x}}")
    (tmp_path / "inner").mkdir()
    with pytest.raises(SpecInvalid, match="expected the compose file"):
        read_project(tmp_path / "inner", "../docker-compose.yaml")


def test_a_link_out_of_the_context_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/hostname")
    assert "nothing of the host" in refusal(tmp_path, service(volumes=["./link:/x:ro"]))
    assert "a file of the context" in refusal(tmp_path, service(env_file="link"))


def test_copies_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    volumes = ", ".join(f"./:/a{n}:ro" for n in range(300))
    project = read(tmp_path, f"services: {{main: {{image: x, volumes: [{volumes}]}}}}")
    with pytest.raises(SpecInvalid, match="at most 256 mounts of the context"):
        plan._refuse_many(project, tmp_path)


def test_aliases_that_blow_a_file_up_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "at most" in refusal_of_text(tmp_path, "\n".join([*lines, "services: {main: {image: x}}"]))
    assert "at most" in refusal_of_text(tmp_path, "services: &s {main: *s}")


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(
            ["a0: &a0 {x: 1, y: 2}", *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 9))]
        ),
        "a: &a {x: 1, <<: [&b {y: 1, <<: [*a, *a]}, *b]}",
        "a: &a {x: &l [*a, *a]}\nb: {<<: *l}",
        "a: {" + ", ".join(f"k{n}: 1" for n in range(20_001)) + "}",
    ],
    ids=["levels", "in a circle", "by way of a list", "one large map"],
)
def test_maps_that_are_merged_into_large_ones_are_refused_before_they_are_made(tmp_path: Path, text: str) -> None:
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml.SafeLoader, "flatten_mapping", lambda loader, node: made.append(node))
        message = refusal_of_text(tmp_path, f"{text}\nservices: {{main: {{image: x}}}}")
    assert "at most 20000 entries" in message
    assert made == []


def test_what_a_loader_cannot_make_a_value_of_is_no_fault_of_ours(tmp_path: Path) -> None:
    for text in (f"a: {'9' * 5000}", "a: 2020-13-45", "[" * 5000):
        assert "expected YAML" in refusal_of_text(tmp_path, text)
    assert "expected at most 1048576 bytes" in refusal_of_text(tmp_path, "# " + "x" * (1 << 20))


def refusal_of_text(folder: Path, text: str) -> str:
    with pytest.raises(SpecInvalid) as caught:
        read(folder, text)
    return str(caught.value)


def test_what_main_and_its_containers_do_anyway_is_noted(tmp_path: Path) -> None:
    project = read(tmp_path, yaml.safe_dump(service(init=True, ulimits={"core": -1, "nproc": 5})))
    assert [one.partition(":")[0] for one in project.notes] == ["services.main.ulimits", "services.main.init"]


def test_too_many_services_are_refused(tmp_path: Path) -> None:
    names = ["main", *(f"s{number}" for number in range(MAX_SERVICES))]
    assert "1 to 32 services" in refusal(tmp_path, {"services": {name: {"image": "x"} for name in names}})


def test_arguments_and_the_last_stage_are_written_into_the_recipe() -> None:
    text = "ARG BASE=x\nFROM ${BASE} AS one\nARG NAME\nRUN echo\nFROM one AS two\nCOPY . .\nFROM two\nRUN late\n"
    assert adapted(text, {"BASE": "y", "NAME": 'a "$b"'}, "TWO") == (
        'ARG BASE="y"\nFROM ${BASE} AS one\nARG NAME="a \\"\\$b\\""\nRUN echo\nFROM one AS two\nCOPY . .\n'
    )
    assert adapted(text, {}, "0").endswith("RUN echo\n")
    assert adapted("ARG A='1 2' B=2 C\n", {"B": "3"}) == "ARG A='1 2'\nARG B=\"3\"\nARG C\n"
    with pytest.raises(SpecInvalid, match="on one line"):
        adapted("ARG A=1 \\\n  B=2\n", {"A": "3"})
    with pytest.raises(SpecInvalid, match="found one, two, 2"):
        adapted(text, {}, "three")


def test_a_services_context_is_the_same_bytes_wherever_it_was_unpacked(tmp_path: Path) -> None:
    archives = []
    for name in ("a", "b"):
        folder = written(tmp_path / name, "", web__Dockerfile="ARG A\nFROM x\n", web__sub__run="1", other="2")
        (folder / "web" / "sub" / "run").chmod(0o700)
        archives.append(context_of(folder, ServiceBuild(context="web", args={"A": name})))
        archives.append(context_of(folder, ServiceBuild(context="web")))
    with_a, plain, with_b, plain_again = archives
    assert plain == plain_again
    assert len({with_a, plain, with_b}) == 3
    with tarfile.open(fileobj=io.BytesIO(with_b)) as tar:
        assert sorted(tar.getnames()) == ["Dockerfile", "sub", "sub/run"]
        assert tar.getmember("sub/run").mode == 0o755
        assert tar.extractfile("Dockerfile").read() == b'ARG A="b"\nFROM x\n'  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("words", "waits"),
    [
        (["sh", "-c", "sleep infinity"], True),
        (["/bin/bash", "-c", "while true; do sleep 1; done"], True),
        (["tail", "-f", "/dev/null"], True),
        (["sleep", "infinity"], True),
        (["/bin/bash"], True),
        (["sh", "-c", "nginx; sleep infinity"], False),
        (["sh", "-c", "sleep 5 && serve"], False),
        (["python3", "serve.py"], False),
        (["bash", "-c", "tail -f /dev/null & serve"], False),
    ],
)
def test_a_command_that_only_waits_is_told_from_one_that_works(words: list[str], waits: bool) -> None:
    assert idle(words) is waits


STORED: dict[str, bytes] = {}


def keep(folder: Path) -> Bundle:
    bundle, STORED[bundle.sha256] = pack(folder)
    return bundle


def names_in(bundle: Bundle) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(STORED[bundle.sha256])) as tar:
        return tar.getnames()


def harbor(folder: Path, text: str, toml: str = "") -> Path:
    files = {
        "task.toml": toml,
        "instruction.md": "Do it.",
        "environment/Dockerfile": "FROM scratch\nWORKDIR /srv\n",
        "environment/docker-compose.yaml": text,
        "tests/test.sh": "true",
    }
    return write_files(folder, files)


def test_harbors_own_file_gives_the_main_service_its_image(tmp_path: Path) -> None:
    other = "services: {db: {image: 'db:1'}}"
    [built] = load(str(harbor(tmp_path / "a", other)), Reading(pack=keep))
    assert read_stored(built.environment.compose, tmp_path / "x").services["main"].build == ServiceBuild()
    assert built.environment.workdir == "/srv"
    toml = '[environment]\ndocker_image = "made:1"\nmemory_mb = 256\n'
    [named] = load(str(harbor(tmp_path / "b", other, toml)), Reading(pack=keep))
    assert read_stored(named.environment.compose, tmp_path / "y").services["main"].image == "made:1"
    assert named.environment.resources.memory_bytes == 256 << 20


def read_stored(compose: Any, folder: Path) -> Project:
    with tarfile.open(fileobj=io.BytesIO(STORED[compose.context.sha256])) as tar:
        tar.extractall(folder)
    return read_project(folder, compose.file, compose.service)


def test_a_compose_file_that_asks_for_the_host_is_the_datasets_fault(tmp_path: Path) -> None:
    text = "services: {main: {build: ., privileged: true}, db: {image: x, volumes: ['/:/host']}}"
    with pytest.raises(DatasetInvalid) as caught:
        load(str(harbor(tmp_path / "a", text)), Reading(pack=keep))
    for part in (str(tmp_path / "a" / "task.toml"), "services.main.privileged", "services.db.volumes[0]"):
        assert part in str(caught.value)


CLIENT = """
services:
  client:
    build: {dockerfile: Dockerfile}
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: ["sh", "-c", "sleep infinity"]
    environment: ["TEST_DIR=${T_BENCH_TEST_DIR}"]
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
      - ${T_BENCH_TASK_AGENT_LOGS_PATH}:${T_BENCH_CONTAINER_AGENT_LOGS_PATH}
"""


def terminal_bench(folder: Path, text: str) -> Path:
    files = {
        "task.yaml": "instruction: Do it.\n",
        "Dockerfile": "FROM scratch\nWORKDIR /app\n",
        "client/Dockerfile": "FROM scratch\nWORKDIR /client\n",
        "run-tests.sh": "true\n",
        "tests/test_it.py": "",
        "docker-compose.yaml": text,
    }
    return write_files(folder, files)


def test_terminal_benchs_usual_file_asks_for_no_more_than_its_dockerfile(tmp_path: Path) -> None:
    [task] = load(str(terminal_bench(tmp_path / "a", CLIENT)), Reading(pack=keep))
    assert task.environment.compose is None
    assert task.environment.build is not None


def test_terminal_benchs_other_services_are_kept_and_its_tests_are_hidden(tmp_path: Path) -> None:
    text = CLIENT.replace("dockerfile: Dockerfile", "context: client") + "    mem_limit: 4g\n  server: {image: 's:1'}\n"
    [task] = load(str(terminal_bench(tmp_path / "a", text)), Reading(pack=keep))
    compose = task.environment.compose
    assert compose is not None
    assert compose.service == "client"
    assert (task.environment.workdir, task.environment.network) == ("/client", Network.OPEN)
    assert task.environment.resources == Resources(memory_bytes=4 << 30)
    assert not {"tests", "run-tests.sh", "task.yaml"} & set(names_in(compose.context))


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ("    privileged: true\n", "services.client.privileged"),
        ("      - ./tests:/seen:ro\n", "expected nothing of the tests"),
    ],
)
def test_terminal_benchs_file_is_refused_as_any_other(tmp_path: Path, more: str, complaint: str) -> None:
    with pytest.raises(DatasetInvalid, match=complaint):
        load(str(terminal_bench(tmp_path / "a", CLIENT + more)), Reading(pack=keep))
