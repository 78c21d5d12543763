"""A task gets what nobody used, or what shows no trace of who did: planted, given back, taken again, looked for.

All kinds of leftovers are planted at once and looked for at once, with a reset between and without one: a look that
finds nothing where nothing was taken away proves nothing.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import cast

import pytest

from app.environments.contract import Environment, EnvironmentProvider, Origin, ResetProof, Tags
from app.environments.isolation.fingerprint import Fingerprint, differences
from app.environments.pool import EnvironmentPool
from app.errors import EnvironmentFailed
from app.models.shell import CommandResult, Shell
from app.models.spec import EnvironmentSpec, Resources, Reuse
from app.settings import Settings
from tests.contract.environment_fixtures import FIXTURES, Fixture, built_image, composed, tags_of
from tests.contract.residues import DEEP, LOOK_OUTSIDE, OUTSIDE, REPOSITORY, RESIDUES, Residue, remove_deep
from tests.waiting import eventually

RECYCLING = ("docker", "oci", "compose")
"""Fixtures whose environments a reset does bring back."""
MEMORY_BYTES = 128 << 20
CREATE_S = 60
MARK = "=kind="

kinds = pytest.mark.parametrize("residue", RESIDUES, ids=lambda residue: residue.name.replace(" ", "-"))


@pytest.fixture(scope="module", params=[one.param() for one in FIXTURES if one.isolates and one.name != "kubernetes"])
def fixture(request: pytest.FixtureRequest) -> Fixture:
    """What does not isolate would plant them on this host."""
    found: Fixture = request.param
    return found


@pytest.fixture(scope="session")
def repository_image(base_image_tag: str) -> Iterator[str]:
    """The base image with a repository as its working folder, which therefore lies in no task's own layer."""
    with built_image(f"FROM {base_image_tag}\nWORKDIR /testbed\nRUN {REPOSITORY}\n") as tag:
        yield tag


@pytest.fixture(scope="module")
def spec(fixture: Fixture, request: pytest.FixtureRequest) -> EnvironmentSpec:
    found = fixture.spec(request).model_copy(update={"resources": Resources(memory_bytes=MEMORY_BYTES, pids=200)})
    if found.compose is not None:
        return found.model_copy(update={"compose": composed(request.getfixturevalue("repository_image"))})
    if found.image is None or found.image != request.getfixturevalue("base_image_tag"):
        return found
    return found.model_copy(update={"image": request.getfixturevalue("repository_image")})


@dataclass
class Worker:
    """A standing worker, as far as environments go."""

    pool: EnvironmentPool
    provider: EnvironmentProvider
    spec: EnvironmentSpec
    installation: str

    def take(self, *, allow_reuse: bool = True, tags: Tags | None = None) -> tuple[Environment, Origin]:
        image_id = self.provider.prepare_image(self.spec, timeout_s=CREATE_S)
        tags = tags or tags_of(self.installation)
        return self.pool.acquire(self.provider, self.spec, tags, image_id, timeout_s=CREATE_S, allow_reuse=allow_reuse)

    def give_back(self, environment: Environment) -> ResetProof | None:
        return self.pool.release(environment, reuse=True)


@pytest.fixture(scope="module")
def worker(provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings) -> Iterator[Worker]:
    pool = EnvironmentPool(max_idle=4)
    yield Worker(pool, provider, spec, settings.installation)
    pool.close()


@dataclass
class Story:
    """One environment of two tasks: what was seen in it, by the names of the kinds."""

    before: dict[str, str]
    refused: set[str]
    planted: dict[str, str]
    after: dict[str, str]
    fingerprints: tuple[Fingerprint, Fingerprint, Fingerprint]
    proof: ResetProof | None
    origin: Origin
    same: bool


def in_one_go(environment: Environment, commands: list[str], between: str) -> dict[str, str]:
    """What each wrote, by the name of the kind. Each has a shell of its own, so that none changes another's."""
    script = "".join(f"\necho; echo {MARK}{n}\n(\n{command}\n) {between}\n" for n, command in enumerate(commands))
    result = environment.run(script, timeout_s=60)
    assert not result.timed_out, result.text()[-2000:]
    parts = (f"\n{result.stdout.decode('utf-8', 'backslashreplace')}").split(f"\n{MARK}")[1:]
    told = dict(part.split("\n", 1) for part in parts)
    return {residue.name: told[str(n)] for n, residue in enumerate(RESIDUES)}


def look(environment: Environment) -> dict[str, str]:
    return in_one_go(environment, [residue.look for residue in RESIDUES], "2>/dev/null")


def plant(environment: Environment) -> set[str]:
    """Plant every kind; the names of those that were refused."""
    told = in_one_go(environment, [residue.plant for residue in RESIDUES], ">/dev/null 2>&1; echo $?")
    return {name for name, code in told.items() if code.strip() != "0"}


@pytest.fixture(scope="module")
def story(worker: Worker) -> Story:
    first, _ = worker.take()
    before, fresh = look(first), Fingerprint.take(first)
    refused = plant(first)
    planted, used = look(first), Fingerprint.take(first)
    proof = worker.give_back(first)
    second, origin = worker.take()
    try:
        after, again = look(second), Fingerprint.take(second)
        return Story(before, refused, planted, after, (fresh, used, again), proof, origin, first is second)
    finally:
        worker.pool.release(second, reuse=False)


@kinds
def test_without_a_reset_the_next_task_would_find_it(story: Story, residue: Residue, fixture: Fixture) -> None:
    if residue.name in story.refused:
        assert residue.refusable, "it could not be planted, and so says nothing about the next task"
        assert story.planted[residue.name] == story.before[residue.name]
        return
    if residue.inherited and fixture.name not in RECYCLING:
        pytest.skip("commands are started from outside: they inherit nothing")
    assert story.planted[residue.name] != story.before[residue.name]


@kinds
def test_the_next_task_does_not_find_it(story: Story, residue: Residue) -> None:
    assert story.after[residue.name] == story.before[residue.name]


def test_the_next_task_has_the_very_environment_that_was_full_of_them(story: Story, fixture: Fixture) -> None:
    """Else the suite would say something about new ones alone."""
    if fixture.name not in RECYCLING:
        pytest.skip("here a reset may always say that it is not clean")
    assert story.proof is not None
    assert (story.proof.clean, story.proof.left) == (True, ())
    assert story.proof.removed > 10_000
    assert story.proof.killed >= 4
    assert (story.origin, story.same) == (Origin.RECYCLED, True)


def test_the_fingerprint_tells_and_is_the_same_again(story: Story) -> None:
    fresh, used, again = story.fingerprints
    told = "\n".join(differences(fresh, used))
    for expected in (
        *(
            "processes: sleep came",
            "processes: residue-kworker came",
            "System V queues: msg",
            "sockets: tcp 00000000:1267",
        ),
        *("sockets: unix @residue came", "names: /dev/shm/residue came", "names: /tmp/.residue came", "steering files"),
        *(
            "/etc/passwd changed",
            "/etc/ld.so.preload came",
            ".bash_history came",
            ".git/HEAD changed",
            "refs/stash came",
        ),
        *("/etc/cron.d/residue came", "names: /dev/mqueue/residue came"),
    ):
        assert expected in told
    if story.same:
        assert differences(fresh, again) == ()


def out(environment: Environment, command: str) -> str:
    result = environment.run(command, timeout_s=60)
    assert result.ok, result.text()[-2000:]
    return result.stdout.decode()


@pytest.fixture
def lone(worker: Worker) -> Iterator[Environment]:
    """An environment that no other test has touched."""
    environment, _ = worker.take(allow_reuse=False)
    yield environment
    environment.destroy()


@pytest.mark.parametrize("kind", OUTSIDE)
def test_what_is_done_to_files_from_outside_goes_with_the_task(lone: Environment, worker: Worker, kind: str) -> None:
    before = out(lone, LOOK_OUTSIDE)
    if not lone.run(OUTSIDE[kind], timeout_s=20).ok:
        assert out(lone, LOOK_OUTSIDE) == before
        return
    assert out(lone, LOOK_OUTSIDE) != before
    worker.give_back(lone)
    following, _ = worker.take()
    assert out(following, LOOK_OUTSIDE) == before
    worker.pool.release(following, reuse=False)


def test_folders_deeper_than_a_path_may_be_long_go(
    lone: Environment, worker: Worker, fixture: Fixture, settings: Settings
) -> None:
    out(lone, DEEP)
    try:
        proof = worker.give_back(lone)
        following, origin = worker.take()
        assert out(following, "ls") == "hidden\ntracked\n"
        worker.pool.release(following, reuse=False)
        if fixture.name in RECYCLING:
            assert proof is not None
            assert (proof.clean, origin) == (True, Origin.RECYCLED)
    finally:  # what our own removal cannot do must not stop the tests after this one
        remove_deep(settings.home)


def test_what_the_last_task_had_open_is_dead(lone: Environment, worker: Worker) -> None:
    shell, stream = lone.shell(), lone.stream(["/bin/sh"])
    shell.run("cd /srv; export RESIDUE=mine", timeout_s=20)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(lone.run, "sleep 60; echo done", timeout_s=90)
        time.sleep(0.3)
        worker.give_back(lone)
        following, _ = worker.take()
        with pytest.raises(EnvironmentFailed):
            running.result(timeout=10)
    with pytest.raises(EnvironmentFailed):
        shell.run("true", timeout_s=10)
    with suppress(EnvironmentFailed, OSError):
        stream.write(b"touch /srv/by-the-last-task\n")
    assert out(following, "echo ${RESIDUE-none}; pwd; ls /srv") == "none\n/testbed\n"
    assert out(following, "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 6[0]' || true") == "0\n"
    shell.close()
    stream.close()
    worker.pool.release(following, reuse=False)


def test_variables_of_the_last_task_do_not_reach_the_next(lone: Environment, worker: Worker) -> None:
    lone.run("true", env={"RESIDUE": "mine"}, timeout_s=20)
    with closing(lone.shell(env={"RESIDUE": "mine"})) as shell:
        shell.run("export OTHER=mine; umask 0; ulimit -n 99", timeout_s=20)
    before = out(lone, "ulimit -n")
    worker.give_back(lone)
    following, _ = worker.take()
    with closing(following.shell()) as shell:
        told = shell.run("echo ${RESIDUE-none} ${OTHER-none} $(umask)", timeout_s=20).stdout
    assert told == b"none none 0022\n"
    assert out(following, "ulimit -n") == before
    worker.pool.release(following, reuse=False)


def test_the_memory_of_the_last_task_is_not_blamed_on_the_next(lone: Environment, worker: Worker) -> None:
    assert lone.run(f"exec python3 -c 'bytearray({2 * MEMORY_BYTES})'", timeout_s=60).out_of_memory
    out(lone, "head -c 40000000 /dev/zero > /dev/shm/x")
    peak = lone.stats().memory_peak_bytes
    worker.give_back(lone)
    following, _ = worker.take()
    killed = following.run("kill -9 $$", timeout_s=20)
    assert (killed.exit_code, killed.out_of_memory, b"memory" in killed.stderr) == (137, False, False)
    if peak is not None:
        assert peak > MEMORY_BYTES // 2
        assert (following.stats().memory_peak_bytes or 0) < peak // 2
        assert (following.stats().memory_bytes or 0) < 40_000_000
    assert not following.stats().oom_kills
    assert following.run(f"exec python3 -c 'bytearray({2 * MEMORY_BYTES})'", timeout_s=60).out_of_memory
    worker.pool.release(following, reuse=False)


@pytest.fixture
def of_its_own(worker: Worker) -> Iterator[Worker]:
    """The same worker with nothing idle."""
    made = Worker(EnvironmentPool(max_idle=2), worker.provider, worker.spec, worker.installation)
    yield made
    made.pool.close()


def test_a_task_that_wants_a_fresh_one_never_gets_a_used_one(of_its_own: Worker, fixture: Fixture) -> None:
    worker = of_its_own
    first, _ = worker.take()
    out(first, "touch /srv/used")
    worker.give_back(first)
    assert worker.pool._idle or fixture.name not in RECYCLING, "there must be a used one that it could get"
    second, origin = worker.take(allow_reuse=False)
    assert (origin, second is first) == (Origin.FRESH, False)
    assert out(second, "ls /srv") == ""


def test_one_that_is_not_clean_is_never_given_on(of_its_own: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = of_its_own
    first, _ = worker.take()
    out(first, "touch /srv/used")
    monkeypatch.setattr(type(first), "reset", lambda self: ResetProof(clean=False, left=("/srv/used",)))
    proof = worker.give_back(first)
    assert proof == ResetProof(clean=False, left=("/srv/used",))
    second, origin = worker.take()
    assert (origin, second is first, out(second, "ls /srv")) == (Origin.FRESH, False, "")
    with pytest.raises(EnvironmentFailed):
        first.run("true", timeout_s=10)


class WithoutPrograms:
    """A shell whose commands find no program but itself."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def run(self, command: str, *, timeout_s: float) -> CommandResult:
        return self._environment.run(command, env={"PATH": "/nowhere"}, timeout_s=timeout_s)


@pytest.mark.needs("own_commands")
def test_the_fingerprint_needs_no_program_but_the_shell(of_its_own: Worker) -> None:
    environment, _ = of_its_own.take()
    bare = cast(Shell, WithoutPrograms(environment))
    assert differences(Fingerprint.take(environment), Fingerprint.take(bare)) == (
        "environment variables: PATH changed",
    )
    fresh = Fingerprint.take(bare)
    environment.run("sleep 4714 > /dev/null 2>&1 & echo x >> /etc/passwd; chgrp 7 /etc/passwd", timeout_s=20)
    expected = ("processes: sleep came", "steering files: /etc/passwd changed")
    eventually(lambda: differences(fresh, Fingerprint.take(bare)) == expected)  # a fork has its old name for a moment


@pytest.mark.needs("own_commands")
def test_the_fingerprint_tells_what_differs_and_not_what_it_is(of_its_own: Worker) -> None:
    environment, _ = of_its_own.take()
    fresh = Fingerprint.take(environment)
    environment.run("echo hush > /etc/environment", timeout_s=20)
    used = Fingerprint.take(environment)
    assert differences(fresh, used) == ("steering files: /etc/environment changed",)
    assert "hush" not in repr(used)
    assert "by the task" not in repr(used), "the value of a variable"


@pytest.mark.needs("shares")
def test_shared_ones_are_of_one_run_read_only_and_apart_in_what_they_remember(
    worker: Worker, settings: Settings, provider: EnvironmentProvider
) -> None:
    spec = worker.spec.model_copy(update={"reuse": Reuse.SHARED_READONLY})
    sharing = Worker(EnvironmentPool(max_idle=2), provider, spec, settings.installation)
    ours = tags_of(settings.installation)
    other = replace(ours, task_id=uuid.uuid4(), attempt_id=uuid.uuid4())
    try:
        first, origin = sharing.take(tags=ours)
        second, again = sharing.take(tags=other)
        foreign, _ = sharing.take(tags=tags_of(settings.installation))
        assert (origin, again) == (Origin.FRESH, Origin.RECYCLED)
        assert (first.id == second.id, first.id == foreign.id) == (True, False)
        for place in ("/etc/x", "/testbed/x", "/usr/local/bin/x", "/root/x"):
            assert not first.run(f"echo x > {place}", timeout_s=20).ok, f"{place} was writable"
        with closing(first.shell()) as shell:
            shell.run("export RESIDUE=mine; cd /srv", timeout_s=20)
            assert out(second, "echo ${RESIDUE-none}; pwd") == "none\n/testbed\n"
        sharing.pool.release(first, reuse=True)
        assert second.run("echo lives", timeout_s=20).stdout == b"lives\n"
    finally:
        sharing.pool.close()
