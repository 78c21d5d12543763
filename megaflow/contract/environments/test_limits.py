"""Contract of limits: floods of output, fork bombs, memory; other environments are not affected."""

from __future__ import annotations

import resource
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.environments.contract import Environment, EnvironmentProvider
from app.models.spec import EnvironmentSpec, Resources
from app.settings import Settings
from megaflow.contract.environments.fixture import tags_of
from megaflow.contract.environments.fixtures import Create

MEBI = 1 << 20


_own_commands = pytest.mark.needs("own_commands")


@_own_commands
def test_a_flood_takes_neither_our_memory_nor_the_session(shared: Environment) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = shared.run("head -c 200M /dev/zero; echo; echo end", timeout_s=60)
    assert (result.exit_code, result.truncated, len(result.stdout) < 3 * MEBI) == (0, True, True)
    assert result.stdout.endswith(b"\nend\n")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    assert shared.run("echo well", timeout_s=20).stdout == b"well\n"


@_own_commands
def test_two_floods_at_once_are_told_apart(shared: Environment) -> None:
    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(lambda c: shared.run(f"head -c 9M /dev/zero | tr '\\0' {c}", timeout_s=60), "ab")
    assert (set(one.stdout[:1000]), set(two.stdout[-1000:])) == ({ord("a")}, {ord("b")})


def confined(
    provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings, limits: Resources
) -> Environment:
    limited = spec.model_copy(update={"resources": limits})
    return provider.create(limited, tags_of(settings.installation), timeout_s=60)


@_own_commands
@pytest.mark.needs("isolates")
@pytest.mark.needs("bounds_processes")
def test_a_fork_bomb_ends_with_its_time_and_the_neighbour_is_well(
    provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings, create: Create
) -> None:
    bombed, neighbour = confined(provider, spec, settings, Resources(pids=40, cpus=0.5)), create()
    try:
        bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
        bombed.put("/bomb.py", bomb.encode())
        with ThreadPoolExecutor(1) as threads:
            exploding = threads.submit(bombed.run, "python3 /bomb.py", timeout_s=1.5)
            time.sleep(0.7)
            assert neighbour.run("echo well", timeout_s=20).stdout == b"well\n"
            assert exploding.result(timeout=30).timed_out
        assert bombed.run("echo usable", timeout_s=20).stdout == b"usable\n"
        assert bombed.stats().processes < 10
    finally:
        bombed.destroy()
        neighbour.destroy()


@pytest.mark.needs("isolates")
def test_who_was_killed_for_memory_is_told_from_who_was_killed(
    provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings
) -> None:
    environment = confined(provider, spec, settings, Resources(memory_bytes=48 << 20))
    try:
        greedy = environment.run("exec python3 -c 'x = bytearray(200 << 20)'", timeout_s=60)
        assert (greedy.exit_code, greedy.out_of_memory) == (137, True)
        assert b"memory limit" in greedy.stderr
        killed = environment.run("kill -9 $$", timeout_s=20)
        assert (killed.exit_code, killed.out_of_memory) == (137, False)
        assert environment.run("echo usable", timeout_s=20).stdout == b"usable\n"
    finally:
        environment.destroy()
