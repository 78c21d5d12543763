"""Nothing is left: however an environment ends or fails to begin, host and engine are as before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from app.environments.contract import Environment, EnvironmentProvider
from app.environments.runtimes.local import processes as local_processes
from app.environments.session import transports
from app.environments.sweeper import Sweeper
from app.errors import EngineUnavailable, EnvironmentFailed, ImageUnavailable, StationError
from app.host import environment_records
from app.host.engine import engine_of
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from megaflow.contract.environments.fixture import sweep_all
from tests.contract.environment_fixtures import FIXTURES, Fixture, composed, tags_of

CREATE_S = 60
SETTLE_S = 30.0
"""So long threads, orphans and the engine may take to notice that it is over."""
ASIDE = ("cache", "images", "run/slots")
"""What a home keeps on purpose; of locks, a file each."""


@dataclass(frozen=True)
class World:
    """What there is of an installation on this host and its engine, by name."""

    files: Counter[str] = field(default_factory=Counter)
    descriptors: Counter[str] = field(default_factory=Counter)
    threads: Counter[str] = field(default_factory=Counter)
    children: Counter[str] = field(default_factory=Counter)
    processes: Counter[str] = field(default_factory=Counter)
    mounts: Counter[str] = field(default_factory=Counter)
    cgroups: Counter[str] = field(default_factory=Counter)
    objects: Counter[str] = field(default_factory=Counter)

    def beyond(self, before: World) -> dict[str, list[str]]:
        """What there is more of than `before`."""
        found = {
            name: sorted((getattr(self, name) - getattr(before, name)).elements())
            for name in World.__dataclass_fields__
        }
        return {name: more for name, more in found.items() if more}


class Watcher:
    """Looks at the world of one home and installation; `mark` is in the command line of every process of its tasks."""

    def __init__(self, settings: Settings, mark: str, *, engine: bool) -> None:
        self._settings = settings
        self._mark = mark.encode()
        self._engine = engine
        self._seen: set[str] = set()  # ids, which are never used twice

    def look(self) -> World:
        with suppress(EngineUnavailable):
            engine_of(self._settings).api.close()  # the connections that it keeps for the next request
        return World(
            files=Counter(self._files()),
            descriptors=Counter(self._descriptors()),
            threads=Counter(thread.name.split("_")[0] for thread in threading.enumerate()),
            children=Counter(self._children()),
            processes=Counter(self._processes()),
            mounts=Counter(line for line in _lines("/proc/self/mountinfo") if str(self._settings.home) in line),
            cgroups=Counter(self._cgroups()),
            objects=Counter(self._objects() if self._engine else ()),
        )

    def settled(self, before: World) -> dict[str, list[str]]:
        """What is still there when it had time to go."""
        until = time.monotonic() + SETTLE_S
        while (left := self.look().beyond(before)) and time.monotonic() < until:
            time.sleep(0.1)
        return left

    def _files(self) -> Iterator[str]:
        home = self._settings.home
        for folder, folders, files in os.walk(home):
            folders[:] = [name for name in folders if str((Path(folder) / name).relative_to(home)) not in ASIDE]
            yield from (f"{folder}/{name}" for name in (*folders, *files))

    def _descriptors(self) -> Iterator[str]:
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                yield os.readlink(f"/proc/self/fd/{name}").split(":")[0]

    def _children(self) -> Iterator[str]:
        for task in os.listdir("/proc/self/task"):
            with suppress(OSError):
                for child in Path(f"/proc/self/task/{task}/children").read_text().split():
                    yield Path(f"/proc/{child}/stat").read_text().split(" ", 2)[1]

    def _processes(self) -> Iterator[str]:
        for name in os.listdir("/proc"):
            with suppress(OSError):
                if name.isdigit() and int(name) != os.getpid():
                    line = Path(f"/proc/{name}/cmdline").read_bytes()
                    if self._mark in line:
                        yield line.decode("utf-8", "replace")

    def _cgroups(self) -> Iterator[str]:
        ids = {path.name for path in (self._settings.home / "environments" / "oci").glob("*")}
        for folder in Path("/sys/fs/cgroup").glob("*/megaflow-*"):
            with suppress(OSError):
                if folder.name.removeprefix("megaflow-") in ids | self._seen:
                    self._seen.add(folder.name.removeprefix("megaflow-"))
                    yield str(folder)
        self._seen |= ids

    def _objects(self) -> Iterator[str]:
        api = engine_of(self._settings).api
        labels = {"label": f"megaflow={self._settings.installation}"}
        yield from (f"container {one['Id'][:12]}" for one in api.containers(all=True, filters=labels))
        yield from (f"network {one['Name']}" for one in api.networks(filters=labels))
        yield from (f"volume {one['Name']}" for one in api.volumes(filters=labels)["Volumes"] or ())


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


@pytest.fixture(scope="module", params=[one.param() for one in FIXTURES if one.kind != "kubernetes"])
def fixture(request: pytest.FixtureRequest) -> Fixture:
    """Pods leave things in the tests' API server, which is in this process: `test_pod_faults` looks there."""
    found: Fixture = request.param
    return found


@pytest.fixture(scope="module")
def mark() -> str:
    """A number of seconds that nobody else sleeps."""
    return f"9{uuid.uuid4().int % 10**7}.5"


@pytest.fixture(scope="module")
def watcher(settings: Settings, fixture: Fixture, mark: str) -> Watcher:
    return Watcher(settings, mark, engine=fixture.kind != "local")


@pytest.fixture(scope="module")
def make(provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings) -> Callable[..., Environment]:
    """Makes one, with other fields than the fixture's where they are given."""

    def made(*, timeout_s: float = CREATE_S, **fields: object) -> Environment:
        wanted = spec.model_copy(update=fields)
        return provider.create(wanted, tags_of(settings.installation), timeout_s=timeout_s)

    return made


Make = Callable[..., Environment]


def scaled(many: int, fixture: Fixture) -> int:
    """So many of this fixture: a project takes an engine several times as long as a container."""
    return many // 4 if fixture.kind == "compose" else many


@pytest.fixture(scope="module")
def warm(make: Make, fixture: Fixture) -> None:
    """Everything that is made once has been: connections, caches, locks."""
    with ThreadPoolExecutor(4) as threads:
        for environment in threads.map(lambda _: make(), range(scaled(4, fixture))):
            environment.run("true", timeout_s=20)
            environment.destroy()


@pytest.fixture
def before(watcher: Watcher, warm: None) -> World:
    """The world as it is when a test begins."""
    until = time.monotonic() + SETTLE_S
    while watcher.look().threads["disk-watch"] and time.monotonic() < until:
        time.sleep(0.1)
    return watcher.look()


def test_what_is_left_is_seen(watcher: Watcher, before: World, make: Make, mark: str, fixture: Fixture) -> None:
    """Else the others could not fail."""
    environment = make()
    environment.run(f"sleep {mark} > /dev/null 2>&1 &", timeout_s=20)
    stream = environment.stream(["/bin/cat"])
    try:
        left = watcher.look().beyond(before)
        assert "processes" in left
        assert "descriptors" in left
        assert {"local": "files", "oci": "files"}.get(fixture.kind, "objects") in left
        if fixture.kind == "oci":
            assert "cgroups" in left
    finally:
        stream.close()
        environment.destroy()
        assert watcher.settled(before) == {}


def test_twenty_that_were_used_leave_nothing(
    watcher: Watcher, before: World, make: Make, mark: str, fixture: Fixture
) -> None:
    def use(number: int) -> None:
        environment = make()
        environment.run(f"setsid sleep {mark} > /dev/null 2>&1 & echo x > ${{TMPDIR:-/tmp}}/x-{number}", timeout_s=20)
        shell, stream = environment.shell(), environment.stream(["/bin/sh", "-c", f"sleep {mark}"])
        shell.run("cd /; export A=b", timeout_s=20)
        environment.put("/testbed/x", b"x" * 100_000)
        if number % 4 == 0:
            environment.reset()
        if number % 2:  # else they are open when it ends
            shell.close()
            stream.close()
        environment.destroy()
        environment.destroy()
        shell.close()
        stream.close()

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(use, number) for number in range(scaled(20, fixture))]:
            done.result()
    assert watcher.settled(before) == {}


@pytest.mark.needs("own_commands")
def test_one_that_ends_amid_its_commands_leaves_nothing(watcher: Watcher, before: World, make: Make, mark: str) -> None:
    environment = make()
    with ThreadPoolExecutor(5) as threads:
        running = [threads.submit(environment.run, f"sleep {mark}", timeout_s=90) for _ in range(5)]
        time.sleep(0.5)
        environment.destroy()
        for one in running:
            with pytest.raises(EnvironmentFailed):
                one.result(timeout=20)
    assert watcher.settled(before) == {}


def test_an_image_that_is_nowhere_leaves_nothing(
    watcher: Watcher, before: World, make: Make, fixture: Fixture, settings: Settings
) -> None:
    if fixture.kind == "local":
        pytest.skip("this kind has no images")
    nowhere = "localhost:1/there/is/none:1"
    several = {"compose": composed(settings.base_image, beside=nowhere)}
    for _ in range(5):
        with pytest.raises(ImageUnavailable):
            make(**(several if fixture.kind == "compose" else {"image": nowhere}))
    assert watcher.settled(before) == {}


@pytest.mark.parametrize(
    ("setup", "timeout_s"),
    [
        ("sleep {mark} > /dev/null 2>&1 & echo x > ${{TMPDIR:-/tmp}}/x; exit 3", CREATE_S),
        ("setsid sleep {mark} > /dev/null 2>&1 & sleep {mark}", 2.0),
        ("trap '' TERM INT HUP; while :; do sleep {mark}; done", 2.0),
    ],
    ids=["fails", "hangs", "ignores-signals"],
)
def test_a_set_up_that_does_not_succeed_leaves_nothing(
    watcher: Watcher, before: World, make: Make, mark: str, setup: str, timeout_s: float
) -> None:
    def try_it(number: int) -> None:
        with pytest.raises(EnvironmentFailed):
            make(setup=(f"{setup.format(mark=mark)} # {number}",), timeout_s=timeout_s)

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(try_it, number) for number in range(3)]:
            done.result()
    assert watcher.settled(before) == {}


@pytest.mark.extra
def test_those_that_are_swept_while_they_are_made_leave_nothing(
    watcher: Watcher, before: World, make: Make, settings: Settings, fixture: Fixture
) -> None:
    over = threading.Event()

    def sweep() -> None:
        while not over.wait(0.01):
            sweep_all(settings)

    def use() -> None:
        with suppress(StationError):
            environment = make(timeout_s=20)
            with suppress(StationError):
                environment.run("true", timeout_s=10)
            environment.destroy()

    with ThreadPoolExecutor(5) as threads:
        sweeping = threads.submit(sweep)
        try:
            for done in [threads.submit(use) for _ in range(scaled(12, fixture))]:
                done.result(timeout=60)
        finally:
            over.set()
        sweeping.result(timeout=30)
    sweep_all(settings)
    assert watcher.settled(before) == {}


MAKER = """
import sys, threading, time
from pathlib import Path
from uuid import UUID
from app.environments.contract import Tags
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from tests.contract.environment_fixtures import FIXTURES

home, installation, name, spec, instance, mark = sys.argv[1:]
fixture = next(one for one in FIXTURES if one.name == name)
settings = Settings(home=Path(home), installation=installation)
provider, spec = fixture.provider(settings), EnvironmentSpec.model_validate_json(spec)
tags = Tags(installation, *[UUID(instance)] * 4, time.time() + 600)
made = [provider.create(spec, tags, timeout_s=60) for _ in range(3)]
for one in made:
    one.run(f"setsid sleep {mark} > /dev/null 2>&1 &", timeout_s=20)
    threading.Thread(target=one.run, args=(f"sleep {mark}",), kwargs={"timeout_s": 90}, daemon=True).start()
time.sleep(0.3)
print("ready", flush=True)
while True:
    provider.create(spec, tags, timeout_s=60)
"""


def test_a_maker_that_is_killed_leaves_nothing_after_a_sweep(
    watcher: Watcher,
    before: World,
    spec: EnvironmentSpec,
    settings: Settings,
    fixture: Fixture,
    mark: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if fixture not in FIXTURES:
        pytest.skip("another process does not know this fixture")
    instance = uuid.uuid4()
    about = [fixture.name, spec.model_dump_json(), str(instance), mark]
    words = [str(settings.home), settings.installation, *about]
    with subprocess.Popen(
        [sys.executable, "-c", MAKER, *words], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as maker:
        try:
            assert maker.stdout is not None
            assert b"ready\n" in iter(maker.stdout.readline, b"")
            assert watcher.look().beyond(before)["processes"], "there is something to be left"
            time.sleep(0.15)
        finally:
            maker.send_signal(signal.SIGKILL)
    until = time.monotonic() + CREATE_S
    # An engine may be at what it was asked for last; nets are cast again and again.
    while True:
        Sweeper(settings).sweep(set(), ended={instance})
        left = watcher.look().beyond(before)
        if left.keys() <= {"files", "processes", "children"}:
            break
        assert time.monotonic() < until, left
        time.sleep(0.5)
    # A folder of a start that was cut short is nobody's until it is old; then the next maker removes it.
    monkeypatch.setattr(transports, "_STALE_S", 0.0)
    monkeypatch.setattr(environment_records, "_YOUNG_S", 0.0)
    monkeypatch.setattr(local_processes, "_YOUNG_S", 0.0)
    if fixture.name in ("docker", "compose"):  # it makes its own folder
        transports.MountedHelper(engine_of(settings), settings.home).close()
    sweep_all(settings)
    assert watcher.settled(before) == {}
