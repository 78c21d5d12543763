"""Contract of an environment's life: set-up, description, reset, end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.environments.contract import Environment, EnvironmentProvider
from app.errors import EnvironmentFailed
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from megaflow.contract.environments.fixture import Fixture, tags_of, tar_of
from megaflow.contract.environments.fixtures import Create

PHASES = {"image", "create", "start", "session", "set_up", "reset", "teardown"}


def test_destroy_aborts_a_running_command_quickly(create: Create) -> None:
    environment = create()
    running = ThreadPoolExecutor(1).submit(environment.run, "sleep 60", timeout_s=90)
    time.sleep(0.5)
    begun = time.monotonic()
    environment.destroy()
    with pytest.raises(EnvironmentFailed, match="destroyed") as caught:
        running.result(timeout=20)
    assert "environment environment" not in str(caught.value)
    assert time.monotonic() - begun < 9


def test_after_destroy_everything_fails_and_destroy_is_safe_again(create: Create) -> None:
    environment = create()
    environment.destroy()
    environment.destroy()
    calls: list[Callable[[], object]] = [
        lambda: environment.run("true", timeout_s=5),
        lambda: environment.put("/x", b""),
        lambda: environment.get("/x"),
        lambda: environment.put_tree(tar_of({"x": b""}), "/x"),
        lambda: environment.get_tree("/testbed"),
        lambda: environment.shell().run("true", timeout_s=5),
        lambda: environment.stream(["/bin/cat"]),
        lambda: environment.stats(),
    ]
    for call in calls:
        with pytest.raises(EnvironmentFailed):
            call()
    assert not environment.reset().clean


def test_destroy_from_many_threads_is_safe(create: Create) -> None:
    environment = create()
    barrier = threading.Barrier(4)

    def end() -> None:
        barrier.wait()
        environment.destroy()

    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(end) for _ in range(4)]:
            future.result()


def test_set_up_commands_have_run_and_a_failing_one_is_told(
    provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings
) -> None:
    with_setup = spec.model_copy(update={"setup": ("echo one > set-up", "echo two >> set-up")})
    environment = provider.create(with_setup, tags_of(settings.installation), timeout_s=60)
    assert environment.get("/testbed/set-up") == b"one\ntwo\n"
    proof = environment.reset()
    assert not proof.clean or environment.get("/testbed/set-up") == b"one\ntwo\n", "what a set-up made is in no image"
    environment.destroy()
    broken = spec.model_copy(update={"setup": ("echo sorry; exit 3",)})
    with pytest.raises(EnvironmentFailed, match=r"(?s)3.*sorry"):
        provider.create(broken, tags_of(settings.installation), timeout_s=60)


def test_two_environments_do_not_share_files(create: Create, own: Environment) -> None:
    other = create()
    own.put("/testbed/mine", b"")
    with pytest.raises(FileNotFoundError):
        other.get("/testbed/mine")
    other.destroy()


def test_a_description_says_what_it_is_and_how_long_it_took(create: Create, fixture: Fixture) -> None:
    environment = create()
    description = environment.describe()
    assert (description["kind"], description["id"], description["origin"], description["path"]) == (
        fixture.kind,
        environment.id,
        "fresh",
        "cold",
    )
    assert description["image"]
    assert {"image", "create", "set_up"} <= description["phases"].keys() <= PHASES
    assert all(0 <= seconds < 60 for seconds in description["phases"].values())
    environment.destroy()
    assert 0 <= environment.describe()["phases"]["teardown"] < 60


def test_what_it_uses_can_be_asked_for(own: Environment) -> None:
    before = own.stats().processes
    own.run("sleep 30 > /dev/null 2>&1 & sleep 30 > /dev/null 2>&1 &", timeout_s=20)
    assert own.stats().processes == before + 2


def _run_until_gone(environment: Environment, *, within_s: float = 20.0) -> None:
    """Runs commands until one fails: some engines end an environment only a moment after the request."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        environment.run("true", timeout_s=20)


def test_a_prepared_image_is_named_the_same_again(provider: EnvironmentProvider, spec: EnvironmentSpec) -> None:
    assert provider.prepare_image(spec, timeout_s=60) == provider.prepare_image(spec, timeout_s=60)
