"""Whatever a task can write to that lies on the host's disk counts against its disk limit: bytes and files."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from app.environments.contract import CommandResult, Environment, EnvironmentProvider
from app.environments.runtimes.compose.environment import ComposeEnvironment
from app.environments.runtimes.docker.container import DockerEnvironment
from app.environments.runtimes.oci.environment import OciEnvironment
from app.errors import EnvironmentOverLimit
from app.host import disk_watch
from app.host.disk import DiskUsage
from app.models.spec import EnvironmentSpec, Network, Resources
from app.settings import Settings
from tests.contract.environment_fixtures import Fixture, tags_of
from tests.security.environments import RUNTIMES

MEBI = 1 << 20
_IN_MEMORY = {"tmpfs", "devtmpfs", "proc", "sysfs", "devpts", "mqueue", "cgroup", "cgroup2"}
_WRITE = """
if [ -d {place} ]; then head -c {size} /dev/zero > {place}/written
elif [ -f {place} ]; then head -c {size} /dev/zero >> {place}
else exit 9; fi
"""
_MOUNTED_FILES = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
_NAMELESS = """
import mmap, os, time
for kept in (True, False):
    handle = os.open("/srv/nameless", os.O_RDWR | os.O_CREAT)
    os.unlink("/srv/nameless")
    if kept:
        os.write(handle, bytes({half}))
    else:
        os.ftruncate(handle, {half})
        mapped = mmap.mmap(handle, {half})
        mapped[:] = b"x" * {half}
        os.close(handle)
print("written", flush=True)
time.sleep({seconds})
"""
Run = Callable[[str], CommandResult]


@pytest.fixture(scope="module", params=RUNTIMES)
def fixture(request: pytest.FixtureRequest) -> Fixture:
    found: Fixture = request.param
    return found


@pytest.fixture
def limited(
    provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings
) -> Iterator[Callable[..., Environment]]:
    """Makes environments with a small disk; they go whatever happens."""
    made: list[Environment] = []

    def make(**changes: object) -> Environment:
        wanted = spec.model_copy(update={"resources": Resources(disk_bytes=64 * MEBI), **changes})
        made.append(provider.create(wanted, tags_of(settings.installation), timeout_s=60))
        return made[-1]

    yield make
    for environment in made:
        environment.destroy()


def sides(environment: Environment) -> list[tuple[str, Run]]:
    """Where commands can run: in a project in each service."""
    if not isinstance(environment, ComposeEnvironment):
        return [("main", lambda command: environment.run(command, timeout_s=60))]
    return [(name, _in(environment, name)) for name in environment.services]


def _in(environment: ComposeEnvironment, service: str) -> Run:
    return lambda command: environment.run_in(service, command, timeout_s=60)


def written(environment: Environment) -> DiskUsage:
    if isinstance(environment, ComposeEnvironment):
        return environment._disk.written()
    assert isinstance(environment, DockerEnvironment | OciEnvironment)
    found = environment.written()
    assert found is not None
    return found


def writable_mounts(mountinfo: str) -> list[str]:
    """Mount points on a disk that are not read-only, by the text of /proc/self/mountinfo."""
    found = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        point, options = before.split()[4], before.split()[5].split(",")
        if after.split()[0] not in _IN_MEMORY and "rw" in options:
            found.append(point)
    return found


@pytest.mark.parametrize("network", [Network.NONE, Network.OPEN])
def test_every_mount_that_can_be_written_to_counts(
    limited: Callable[..., Environment], fixture: Fixture, network: Network
) -> None:
    if network is Network.OPEN and fixture.name == "oci":
        pytest.skip("`oci` has no open network")
    environment = limited(network=network)
    for side, run in sides(environment):
        places = writable_mounts(run("cat /proc/self/mountinfo").stdout.decode())
        assert "/" in places, side
        for place in places:
            before = written(environment).size_bytes
            if run(_WRITE.format(place=place, size=MEBI)).ok:
                assert written(environment).size_bytes >= before + MEBI, (side, place)


@pytest.mark.parametrize(
    "file", [_MOUNTED_FILES[0], *(pytest.param(one, marks=pytest.mark.extra) for one in _MOUNTED_FILES[1:])]
)
def test_who_fills_a_file_that_the_engine_mounts_is_ended(
    limited: Callable[..., Environment], fixture: Fixture, file: str
) -> None:
    """Where the network is open an engine mounts all three."""
    environment = limited(network=Network.NONE if fixture.name == "oci" else Network.OPEN)
    _, run = sides(environment)[-1]
    with pytest.raises(EnvironmentOverLimit, match="disk limit"):
        run(f"head -c 300000000 /dev/zero > {file}; sleep 20; echo survived")
    with pytest.raises(EnvironmentOverLimit, match="disk limit"):
        environment.run("true", timeout_s=10)


@pytest.mark.extra
def test_files_without_a_name_count(limited: Callable[..., Environment]) -> None:
    environment = limited()
    _, run = sides(environment)[-1]
    with pytest.raises(EnvironmentOverLimit, match="disk limit"):
        run(f"python3 - <<'CODE'\n{_NAMELESS.format(half=48 * MEBI, seconds=30)}CODE")


def test_who_makes_too_many_files_is_ended(
    limited: Callable[..., Environment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_watch, "_LEAST_FILES", 5000)
    monkeypatch.setattr(disk_watch, "_BYTES_PER_FILE", 1 << 40)
    monkeypatch.setattr(disk_watch, "_GROWTH_FILES", 1000)
    environment = limited()
    _, run = sides(environment)[-1]
    with pytest.raises(EnvironmentOverLimit, match="disk limit of 5000 files reached"):
        run("mkdir /srv/many && cd /srv/many && seq 20000 | xargs touch; sleep 20; echo survived")


def test_some_lines_in_the_hosts_file_are_fine(limited: Callable[..., Environment]) -> None:
    environment = limited()
    assert environment.run("echo 127.0.0.1 other.invalid >> /etc/hosts && getent hosts other.invalid", timeout_s=20).ok
