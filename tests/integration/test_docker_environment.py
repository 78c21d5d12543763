"""Containers on a real engine: limits that hold, isolation, residue, labels, speed, the pool."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.environments.runtimes.docker.provider import DockerProvider
from app.environments.session import transports
from app.environments.sweeper import Sweeper
from app.errors import EngineUnavailable, EnvironmentFailed, EnvironmentVanished, ImageUnfit
from app.grading.protected import decide
from app.host.engine import Engine
from app.models.spec import EnvironmentSpec, Network, Resources, Reuse
from app.settings import Settings
from tests.integration.docker_fixture import Create, create, engine, out, provider, settings, tags_of
from tests.waiting import eventually

__all__ = ["create", "engine", "provider", "settings"]
pytestmark = pytest.mark.docker


def test_the_processor_limit_holds(create: Create) -> None:
    environment = create(resources=Resources(cpus=0.5))
    burn = "import time; b = time.monotonic()\nwhile time.monotonic() - b < 2: pass\nprint(time.process_time())"
    assert float(out(environment, f"python3 -c '{burn}'")) < 1.4


def test_there_is_no_network_unless_asked_for(create: Create) -> None:
    assert out(create(), "ls /sys/class/net").split() == ["lo"]


def test_an_open_network_is_our_own_and_its_members_do_not_see_each_other(create: Create, engine: Engine) -> None:
    one, two = (create(network=Network.OPEN) for _ in range(2))
    assert sorted(out(one, "ls /sys/class/net").split()) == ["eth0", "lo"]
    [address] = engine.api.inspect_container(two.id)["NetworkSettings"]["Networks"].values()
    two.run("python3 -m http.server 8000 > /dev/null 2>&1 &", timeout_s=20)
    gateway = address["Gateway"]
    reach = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"
    time.sleep(1)
    assert two.run(f"python3 -c '{reach}' 127.0.0.1 8000", timeout_s=20).ok
    assert not one.run(f"python3 -c '{reach}' {address['IPAddress']} 8000", timeout_s=20).ok
    with socket.create_server((gateway, 0)) as outside:
        assert not one.run(f"python3 -c '{reach}' {gateway} {outside.getsockname()[1]}", timeout_s=20).ok


def test_privileges_are_few_and_cannot_grow(create: Create) -> None:
    environment = create()
    status = dict(line.split(":\t") for line in out(environment, "cat /proc/self/status").splitlines() if ":\t" in line)
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    kept = {0, 1, 3, 4, 5, 6, 7}  # chown, dac_override, fowner, fsetid, kill, setgid, setuid
    assert {bit for bit in range(64) if int(status["CapBnd"], 16) >> bit & 1} == kept
    assert not environment.run("mknod /dev/mine b 8 0", timeout_s=20).ok
    assert not environment.run("mount -t tmpfs none /mnt", timeout_s=20).ok


def test_the_engines_socket_is_not_inside(create: Create) -> None:
    environment = create()
    assert (
        out(environment, "find / -xdev -type s 2>/dev/null; ls -a /run/docker.sock /var/run/docker.sock 2>/dev/null")
        == ""
    )
    assert "docker.sock" not in out(environment, "cat /proc/self/mountinfo")


TRANSPORTS = {
    "mounted": (transports.MountedHelper,),
    "copied": (transports.CopiedHelper,),
}


@pytest.fixture(params=TRANSPORTS)
def by_transport(request: pytest.FixtureRequest, settings: Settings, docker_engine: str) -> DockerProvider:
    """A provider that knows one transport into its containers."""
    return DockerProvider(settings, fetch_bundle=lambda bundle: b"", transports=TRANSPORTS[request.param])


def test_an_image_with_hardly_more_than_a_shell_is_enough(
    engine: Engine, by_transport: DockerProvider, settings: Settings
) -> None:
    tag = f"megaflow/test-shell:{uuid.uuid4().hex[:8]}"
    engine.api.import_image_from_data(shell_only(), repository=tag.partition(":")[0], tag=tag.partition(":")[2])
    try:
        spec = EnvironmentSpec(image=tag, workdir="/work")
        environment = by_transport.create(spec, tags_of(settings.installation), timeout_s=60)
        environment.put("/deep/er/file", b"x\n")
        assert out(environment, "cat /deep/er/file; pwd") == "x\n/work\n"
        assert environment.run("sleep 50 & sleep 61.7", timeout_s=1).timed_out
        assert out(environment, "cat /proc/[0-9]*/cmdline").count("61.7") == 0
        environment.destroy()
    finally:
        engine.api.remove_image(tag, force=True)


def test_an_image_without_a_shell_is_unfit_and_no_container_stays(engine: Engine, provider: DockerProvider) -> None:
    installation, tag = f"test-{uuid.uuid4().hex[:8]}", f"megaflow/test-bare:{uuid.uuid4().hex[:8]}"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add("/etc/hostname", "etc/name")
    engine.api.import_image_from_data(buffer.getvalue(), repository=tag.partition(":")[0], tag=tag.partition(":")[2])
    try:
        with pytest.raises(ImageUnfit, match=r"has no /bin/sh: expected a POSIX shell"):
            provider.create(EnvironmentSpec(image=tag), tags_of(installation), timeout_s=60)
        assert engine.api.containers(all=True, filters={"label": f"megaflow={installation}"}) == []
    finally:
        engine.api.remove_image(tag, force=True)


def shell_only() -> bytes:
    """A file system with this host's sh, sleep, cat and grep, and the libraries that they need."""
    programs = {"sh": "/bin/sh", "sleep": "/bin/sleep", "cat": "/bin/cat", "grep": "/bin/grep"}
    linked = subprocess.run(["ldd", *programs.values()], check=True, capture_output=True, text=True).stdout
    libraries = {word for word in linked.split() if word.startswith("/") and not word.endswith(":")}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as tar:
        for name, path in programs.items():
            tar.add(Path(path).resolve(), f"bin/{name}")
        for library in libraries:
            tar.add(Path(library).resolve(), library.lstrip("/"))
    return buffer.getvalue()


def test_a_container_that_vanished_or_died_is_told(
    by_transport: DockerProvider, base_image_tag: str, settings: Settings, engine: Engine
) -> None:
    spec = EnvironmentSpec(image=base_image_tag)
    vanished, died = (by_transport.create(spec, tags_of(settings.installation), timeout_s=60) for _ in range(2))
    running = ThreadPoolExecutor(1).submit(vanished.run, "sleep 60", timeout_s=90)
    dying = ThreadPoolExecutor(1).submit(died.run, "sleep 60", timeout_s=90)
    for environment in (vanished, died):
        while "sleep\x0060" not in out(environment, "cat /proc/[0-9]*/cmdline"):
            time.sleep(0.05)
    engine.api.remove_container(vanished.id, force=True)
    with pytest.raises(EnvironmentFailed):  # and no result with exit code 137
        running.result(timeout=30)
    with pytest.raises(EnvironmentVanished, match="No such container"):
        vanished.run("true", timeout_s=5)
    with pytest.raises(EnvironmentVanished, match="No such container"):
        vanished.get("/etc/passwd")
    engine.api.kill(died.id)
    with pytest.raises(EnvironmentVanished, match="not running"):
        died.run("true", timeout_s=5)
    with pytest.raises(EnvironmentVanished, match="not running"):
        dying.result(timeout=30)
    for environment in (vanished, died):
        environment.destroy()


def test_nothing_of_the_session_can_be_reached_from_inside(create: Create, settings: Settings) -> None:
    environment = create()
    assert list((settings.home / "run" / "sessions").iterdir()) == []
    assert out(environment, "find / -type s 2>/dev/null") == ""
    assert not environment.run("touch /dev/.megaflow/x", timeout_s=20).ok
    assert not environment.run("echo x >> /dev/.megaflow-helper", timeout_s=20).ok
    for _ in range(40):  # and yet new connections find their way
        assert environment.run("true", timeout_s=20).ok
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda _: environment.run("sleep 0.2", timeout_s=20).ok, range(8)))


def test_commands_run_as_the_images_user(
    engine: Engine, by_transport: DockerProvider, settings: Settings, base_image_tag: str
) -> None:
    with derived_image(engine, base_image_tag, "USER nobody") as tag:
        environment = by_transport.create(EnvironmentSpec(image=tag), tags_of(settings.installation), timeout_s=60)
        assert out(environment, "id -un; id -Gn; echo $HOME") == "nobody\nnogroup\n/nonexistent\n"
        assert not environment.run("touch /etc/mine", timeout_s=20).ok
        environment.put("/testbed/file", b"x")
        assert out(environment, "cat /testbed/file") == "x"
        environment.destroy()


@contextmanager
def derived_image(engine: Engine, base: str, *changes: str) -> Iterator[str]:
    tag = f"megaflow/test-derived:{uuid.uuid4().hex[:8]}"
    made = engine.api.create_container(base, "true", labels={"megaflow": "test"})["Id"]
    try:
        engine.api.commit(made, tag.partition(":")[0], tag.partition(":")[2], changes="\n".join(changes))
    finally:
        engine.api.remove_container(made, force=True)
    try:
        yield tag
    finally:
        engine.api.remove_image(tag, force=True)


CREATE = """
import sys, time, uuid
from pathlib import Path
from app.environments.contract import Tags
from app.environments.runtimes.docker.provider import DockerProvider
from app.host.engine import engine_of
from app.environments.session import transports
from app.models.spec import EnvironmentSpec
from app.settings import Settings

home, installation, image, orphan_exit_s = sys.argv[1:]
transports.ORPHAN_EXIT_S = int(orphan_exit_s)
settings = Settings(home=Path(home), installation=installation)
provider = DockerProvider(settings, fetch_bundle=lambda bundle: b"")
tags = Tags(installation, *(uuid.uuid4() for _ in range(4)), time.time() + 600)
environment = provider.create(EnvironmentSpec(image=image), tags, timeout_s=60)
assert environment.run("echo well", timeout_s=20).stdout == b"well\\n"
[used] = transports.candidates(engine_of(settings), transports.TRANSPORTS)
print("ready", environment.id, used.__name__, flush=True)
"""


def test_an_environment_whose_worker_was_killed_ends_itself(
    settings: Settings, base_image_tag: str, engine: Engine
) -> None:
    argv = [sys.executable, "-c", CREATE + "time.sleep(60)", str(settings.home), settings.installation]
    with subprocess.Popen([*argv, base_image_tag, "1"], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        try:
            ready = next(line for line in worker.stdout if line.startswith("ready "))
            container_id = ready.split()[1]
            assert "MountedHelper" in ready
            time.sleep(2.5)  # an idle connection is enough to live on
            assert engine.api.inspect_container(container_id)["State"]["Running"]
        finally:
            worker.kill()
    state = lambda: engine.api.inspect_container(container_id)["State"]  # noqa: E731
    eventually(lambda: not state()["Running"], "its end, without an owner", within_s=10)  # by default after a minute
    engine.remove(container_id)


def test_an_image_with_volumes_is_restarted_without_suspicion_and_never_clean(
    engine: Engine, create: Create, base_image_tag: str
) -> None:
    with derived_image(engine, base_image_tag, "VOLUME /data") as tag:
        environment = create(image=tag)
        mounts = engine.api.inspect_container(environment.id)["Mounts"]
        [volume] = [mount["Name"] for mount in mounts if mount["Type"] == "volume"]
        assert environment.run("mkdir -p /srv/config; printf '[x]' >/root/.gitconfig", timeout_s=20).ok
        assert environment.restart(decide).suspect == ()
        assert not environment.reset().clean
        environment.destroy()
        assert volume not in [found["Name"] for found in engine.api.volumes()["Volumes"] or []]


@pytest.mark.parametrize("url", ["unix:///nonexistent/engine.sock", "tcp://127.0.0.1:1", "ssh://somewhere"])
def test_an_engine_that_does_not_answer_is_named_with_the_mend(settings: Settings, url: str) -> None:
    provider = DockerProvider(settings.model_copy(update={"docker_url": url}), fetch_bundle=lambda bundle: b"")
    with pytest.raises(EngineUnavailable, match=r"megaflow up.*MEGAFLOW_DOCKER_URL"):
        provider.prepare_image(EnvironmentSpec(image="any"), timeout_s=10)


def test_the_sweeper_takes_orphans_and_the_overdue(
    provider: DockerProvider, base_image_tag: str, settings: Settings
) -> None:
    alive, dead, late = (tags_of(settings.installation, deadline) for deadline in (600, 600, 8))
    spec = EnvironmentSpec(image=base_image_tag)
    kept, orphan, overdue = (provider.create(spec, tags, timeout_s=60) for tags in (alive, dead, late))
    assert Sweeper(settings).sweep({alive.instance_id, dead.instance_id, late.instance_id}).removed == 0
    time.sleep(8.5)
    assert Sweeper(settings).sweep({alive.instance_id, late.instance_id}).removed == 2
    assert kept.run("true", timeout_s=20).ok
    for gone in (orphan, overdue):
        with pytest.raises(EnvironmentFailed):
            gone.run("true", timeout_s=20)
        gone.destroy()
    kept.destroy()


def test_a_shared_environment_can_be_written_to_in_memory_alone(create: Create) -> None:
    environment = create(reuse=Reuse.SHARED_READONLY, setup=("echo made > /etc/made-by-read-only-test",))
    assert out(environment, "cat /etc/made-by-read-only-test") == "made\n"
    for place in ("/", "/etc", "/testbed", "/usr/bin"):
        assert not environment.run(f"touch {place}/x", cwd="/", timeout_s=20).ok, place
    for place in ("/tmp", "/var/tmp", "/run", "/dev/shm"):
        assert environment.run(f"echo 'echo ran' > {place}/x", timeout_s=20).ok, place
    assert out(environment, "chmod +x /tmp/x; /tmp/x") == "ran\n"
    proof = environment.reset()
    assert (proof.clean, proof.left) == (True, ())
    assert not environment.run("test -e /tmp/x -o -e /run/x -o -e /dev/shm/x", timeout_s=20).ok


def test_what_has_no_network_knows_itself_by_name(create: Create, engine: Engine) -> None:
    environment = create()
    assert "127.0.0.1\tlocalhost" in out(environment, "cat /etc/hosts")
    assert out(environment, "getent hosts localhost").split()[1] == "localhost"
    assert out(environment, "cat /etc/hostname; hostname").split() == [environment.id[:12]] * 2
    assert out(environment, "getent hosts $(hostname)").split()[1] == environment.id[:12]
    assert engine.api.inspect_container(environment.id)["Config"]["NetworkDisabled"], "its start costs half"
    assert out(environment, "echo 127.0.0.1 shop >> /etc/hosts; getent hosts shop").split() == ["127.0.0.1", "shop"]
    assert environment.reset().clean
    assert "shop" not in out(environment, "cat /etc/hosts")
    assert "127.0.0.1\tlocalhost" in out(environment, "cat /etc/hosts")
