"""Containers that change hands between processes: what goes along, what is left behind, and what cannot be given."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Client, Listener
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

import pytest

from app.environments import ways
from app.environments.base import Tags, Taking, Ticket, Transferable
from app.environments.docker import DockerProvider
from app.environments.engine import Engine
from app.environments.sweeper import Sweeper
from app.errors import EnvironmentFailed, EnvironmentOverLimit
from app.models.spec import EnvironmentSpec, Resources
from app.settings import Settings
from tests.integration import docker_ground
from tests.integration.docker_ground import Create, out, provider_of, tags_of

pytestmark = pytest.mark.docker

settings, engine = docker_ground.settings, docker_ground.engine
provider, create = docker_ground.provider, docker_ground.create


def spec_of(image: str, **fields: object) -> EnvironmentSpec:
    return EnvironmentSpec.model_validate({"image": image, **fields})


def test_it_lives_on_in_other_hands(provider: DockerProvider, create: Create, settings: Settings) -> None:
    assert isinstance(provider, Taking)
    given = create(env={"GIVEN": "by the task"})
    assert isinstance(given, Transferable)
    given.put("/testbed/kept", b"kept")
    given.run("nohup sleep 300 >/dev/null 2>&1 &", timeout_s=20)
    ticket = given.hand_over()
    with pytest.raises(EnvironmentFailed, match="handed over"):
        given.run("true", timeout_s=20)
    given.destroy()  # is nobody's to end any more
    owner = tags_of(settings.installation)
    taken = provider_of(settings).take_over(given._spec, ticket, owner)
    assert (taken.id, out(taken, "cat /testbed/kept; echo $GIVEN")) == (given.id, "keptby the task\n")
    assert taken.stats().processes == 1
    told = taken.describe()
    assert told["path"] == "warm"
    assert told["phases"].keys() == {"hand_out", "session"}, "its making is nothing that its taker paid"
    proof = taken.reset()
    assert (proof.clean, proof.killed) == (True, 1)
    assert not taken.run("test -e /testbed/kept", timeout_s=20).ok
    taken.destroy()


def _take_in_child(address: str, settings: Settings, spec: EnvironmentSpec, tags: Tags) -> None:
    with Client(address, family="AF_UNIX") as parent:
        ticket: Ticket = parent.recv()
        descriptors = tuple(recv_handle(parent) for _ in ticket.descriptors)
        taken = provider_of(settings).take_over(spec, replace(ticket, descriptors=descriptors), tags)
        parent.send((taken.run("cat /testbed/kept", timeout_s=20).stdout, taken.hand_over().body["name"]))
    os._exit(0)


def test_another_process_takes_it(create: Create, provider: DockerProvider, settings: Settings, tmp_path: Path) -> None:
    given = create()
    given.put("/testbed/kept", b"kept")
    owner = tags_of(settings.installation)
    with Listener(str(tmp_path / "s"), family="AF_UNIX") as listener:
        child = os.fork()
        if child == 0:
            _take_in_child(str(tmp_path / "s"), settings, given._spec, owner)
        with listener.accept() as connection:
            ticket = given.hand_over()
            connection.send(replace(ticket, descriptors=tuple(0 for _ in ticket.descriptors)))
            for descriptor in ticket.descriptors:
                send_handle(connection, descriptor, child)
                os.close(descriptor)
            said, name = connection.recv()
        assert os.waitpid(child, 0)[1] == 0
    assert said == b"kept"
    assert name.startswith(f"megaflow-{owner.attempt_id}-")
    provider._engine.remove(given.id)


def test_no_socket_of_it_stays_open_here(create: Create, provider: DockerProvider, settings: Settings) -> None:
    given = create()
    assert len(places()) == 1
    ticket = given.hand_over()
    assert len(places()) == 1
    taken = provider.take_over(given._spec, ticket, tags_of(settings.installation))
    assert len(places()) == 1
    taken.destroy()
    assert places() == []


def places() -> list[str]:
    """The sessions' sockets that this process holds by their place."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [link for link in found if "/run/sessions/" in link]


def test_its_memory_is_watched_on(create: Create, provider: DockerProvider, settings: Settings) -> None:
    given = create(resources=Resources(memory_bytes=64 << 20))
    hog = "python3 -c 'b = bytearray(200 << 20)'"
    assert given.run(hog, timeout_s=30).out_of_memory
    taken = provider.take_over(given._spec, given.hand_over(), tags_of(settings.installation))
    assert not taken.run("exit 1", timeout_s=20).out_of_memory
    assert taken.run(hog, timeout_s=30).out_of_memory
    taken.destroy()


def test_one_made_ahead_is_kept_by_its_deadline(
    provider: DockerProvider, engine: Engine, base_image_tag: str, settings: Settings
) -> None:
    keeper = tags_of(settings.installation).instance_id
    ahead = Tags.ahead(settings.installation, keeper, time.time() + 2)
    waiting = provider.create(spec_of(base_image_tag), ahead, timeout_s=60)
    later = time.time() + 600
    waiting.keep_until(later)
    waiting.keep_until(later)
    time.sleep(2.1)
    assert Sweeper(settings).sweep({keeper}).removed == 0
    name = engine.api.inspect_container(waiting.id)["Name"]
    assert name.startswith("/megaflow-ready-")
    assert name.endswith(f"-{later:.0f}")
    waiting.destroy()
    with pytest.raises(EnvironmentFailed):
        waiting.keep_until(later)


def test_a_ticket_of_what_is_gone_is_refused_and_its_files_closed(
    create: Create, provider: DockerProvider, engine: Engine, settings: Settings
) -> None:
    given = create()
    ticket = given.hand_over()
    engine.remove(given.id)
    with pytest.raises(EnvironmentFailed):
        provider.take_over(given._spec, ticket, tags_of(settings.installation))
    for descriptor in ticket.descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_ticket_of_another_kind_is_refused_and_its_files_closed(
    provider: DockerProvider, base_image_tag: str, settings: Settings
) -> None:
    for kind, body in (("other", {}), ("docker", {"entrance": {}})):
        descriptor = os.open(os.devnull, os.O_RDONLY)
        with pytest.raises(EnvironmentFailed):
            provider.take_over(spec_of(base_image_tag), Ticket(kind, body, (descriptor,)), tags_of("x"))
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_what_is_entered_through_its_engine_cannot_be_given(base_image_tag: str, settings: Settings) -> None:
    kinds = (ways.CopiedHelper,)
    provider = DockerProvider(settings, fetch_bundle=lambda bundle: b"", ways=kinds)
    environment = provider.create(spec_of(base_image_tag), tags_of(settings.installation), timeout_s=60)
    with pytest.raises(EnvironmentFailed, match="cannot change hands"):
        environment.hand_over()
    assert environment.run("true", timeout_s=20).ok
    environment.destroy()


def test_what_was_ended_for_its_doing_says_so_and_is_not_given(create: Create) -> None:
    environment = create()
    environment.fail("it took too much", kind=EnvironmentOverLimit)
    for use in (environment.stats, environment.hand_over, lambda: environment.get("/etc/hosts")):
        with pytest.raises(EnvironmentOverLimit, match="it took too much"):
            use()
    assert not environment.reset().clean
