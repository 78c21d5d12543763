"""An environment without a daemon changes hands: one process makes it, another one uses and ends it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from app.environments import disk_watch
from app.environments.base import Tags, Taking, Ticket, Transferable
from app.environments.choice import QuickestProvider
from app.environments.docker import DockerProvider
from app.environments.oci import OciEnvironment, OciProvider, handing, namespace, provider
from app.environments.warm.ahead import Looking
from app.errors import EnvironmentFailed, EnvironmentOverLimit, EnvironmentVanished, StationError
from app.models.spec import Build, Bundle, EnvironmentSpec
from app.settings import Settings
from tests.integration.oci_ground import MEBI, alive, left_over, tags
from tests.integration.oci_ground import oci as oci
from tests.integration.oci_ground import oci_cache as oci_cache
from tests.integration.oci_ground import oci_programs as oci_programs
from tests.integration.oci_ground import oci_settings as oci_settings
from tests.integration.oci_ground import tiny as tiny

MAKER = """
import json, socket, sys, time, uuid
from pathlib import Path
from typing import Any
from app.environments.base import Tags
from app.environments.oci import OciProvider, specification
from app.models.spec import EnvironmentSpec
from app.settings import Settings

home, installation, spec, way, orphan_s = sys.argv[1:]
specification.ORPHAN_S = float(orphan_s)
settings = Settings(home=Path(home), installation=installation, docker_url="unix:///nowhere")
provider = OciProvider(settings, fetch_bundle=lambda bundle: b"")
wanted = EnvironmentSpec.model_validate_json(spec)
environment = provider.create(wanted, Tags.ahead(installation, uuid.uuid4(), time.time() + 60), timeout_s=30)
environment.put("/made", b"by the first")
environment.keep_until(time.time() + 500)
ticket = environment.hand_over()
socket.send_fds(socket.socket(fileno=int(way)), [json.dumps([ticket.kind, ticket.body]).encode()], ticket.descriptors)
environment.destroy()
"""


@contextmanager
def handed(settings: Settings, spec: EnvironmentSpec, *, orphan_s: int = 60) -> Iterator[Ticket]:
    """The ticket of what another process made, which has ended since; who takes it over closes its files."""
    here, there = socket.socketpair()
    with here:
        words = [str(settings.home), settings.installation, spec.model_dump_json(), str(there.fileno()), str(orphan_s)]
        root = Path(__file__).parents[2]
        maker = subprocess.Popen([sys.executable, "-c", MAKER, *words], pass_fds=[there.fileno()], cwd=root)
        there.close()
        content, descriptors, _, _ = socket.recv_fds(here, 1 << 16, 4)
        assert maker.wait(20) == 0
        kind, body = json.loads(content)
        yield Ticket(kind, body, tuple(descriptors))


def ahead(settings: Settings) -> Tags:
    return Tags.ahead(settings.installation, uuid.uuid4(), time.time() + 60)


@pytest.fixture
def first(oci: OciProvider, tiny: EnvironmentSpec, oci_settings: Settings) -> OciEnvironment:
    return oci.create(tiny, ahead(oci_settings), timeout_s=30)


def test_what_one_process_made_another_uses_resets_and_ends(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec
) -> None:
    with handed(oci_settings, tiny) as ticket:
        mine = tags(oci_settings.installation)
        environment = oci.take_over(tiny, ticket, mine)
        told = environment.describe()
        assert (told["path"], told["origin"]) == ("warm", "fresh")
        assert told["phases"].keys() == {"hand_out", "session"}, "its making is nothing that its taker paid"
        (record,) = oci._site.records.all()
        assert record.labels == mine.labels(), "nothing of the first owner's labels stays"
        assert environment.get("/made") == b"by the first"
        assert environment.run('echo "$GIVEN"', timeout_s=10).stdout == b"by the task\n"
        shell = environment.shell()
        assert shell.run("true", timeout_s=10).ok
        shell.close()
        proof = environment.reset()
        assert (proof.clean, environment.describe()["path"]) == (True, "recycled")
        assert not environment.run("cat /made", timeout_s=10).ok
        environment.destroy()
    assert (left_over(oci_settings.home), alive(oci_settings.home)) == ([], [])


def test_a_ticket_keeps_its_environment_alive_for_as_long_as_somebody_holds_it(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec
) -> None:
    with handed(oci_settings, tiny, orphan_s=1) as ticket:
        time.sleep(1.7)
        environment = oci.take_over(tiny, ticket, tags(oci_settings.installation))
        assert environment.run("true", timeout_s=10).ok
        environment.destroy()


def test_an_environment_whose_ticket_was_dropped_ends_by_itself(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec
) -> None:
    with handed(oci_settings, tiny, orphan_s=1) as ticket:
        for descriptor in ticket.descriptors:
            os.close(descriptor)
        give_up = time.monotonic() + 30
        while alive(oci_settings.home) and time.monotonic() < give_up:
            time.sleep(0.05)
        assert alive(oci_settings.home) == []
        without = Ticket(ticket.kind, ticket.body)
        with pytest.raises(EnvironmentVanished, match="ended before it was taken over"):
            oci.take_over(tiny, without, tags(oci_settings.installation))
    assert left_over(oci_settings.home) == []


def test_whoever_gave_it_away_can_neither_use_nor_end_it(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec, first: OciEnvironment
) -> None:
    ticket = first.hand_over()
    for use in (lambda: first.run("true", timeout_s=5), first.hand_over, lambda: first.keep_until(0.0)):
        with pytest.raises(EnvironmentFailed, match="given away"):
            use()
    first.destroy()
    second = oci.take_over(tiny, ticket, tags(oci_settings.installation))
    first.destroy()
    assert second.run("true", timeout_s=10).ok
    second.destroy()
    assert left_over(oci_settings.home) == []


def test_the_tickets_files_are_closed_by_whoever_takes_it_also_in_vain(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec, first: OciEnvironment
) -> None:
    ticket = first.hand_over()
    stray = os.dup(0)
    with pytest.raises(EnvironmentFailed, match="kind"):
        oci.take_over(tiny, Ticket("docker", {}, (stray,)), tags(oci_settings.installation))
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(stray)
    oci.take_over(tiny, ticket, tags(oci_settings.installation)).destroy()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(ticket.descriptors[0])


def test_what_is_kept_lives_until_its_new_deadline(
    oci: OciProvider, oci_settings: Settings, first: OciEnvironment
) -> None:
    until = time.time() + 4000
    first.keep_until(until)
    (record,) = oci._site.records.all()
    assert (record.deadline_unix_s, record.labels["megaflow.ready"]) == (float(f"{until:.0f}"), "1")
    oci.sweep(installation=oci_settings.installation)
    with pytest.raises(EnvironmentVanished, match="removed by somebody else"):
        first.keep_until(until)
    first.destroy()
    assert left_over(oci_settings.home) == [], "a record must not come back"


def test_a_destroyed_environment_cannot_be_given_away(first: OciEnvironment) -> None:
    first.destroy()
    with pytest.raises(EnvironmentFailed, match="destroyed"):
        first.hand_over()


def test_the_disk_limit_holds_for_the_next_owner(
    oci: OciProvider,
    oci_settings: Settings,
    tiny: EnvironmentSpec,
    first: OciEnvironment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk_watch, "LIMIT_BYTES", 64 * MEBI)
    monkeypatch.setattr(disk_watch, "_LOOK_S", 0.05)
    other = OciProvider(oci_settings, fetch_bundle=lambda bundle: b"")
    environment = other.take_over(tiny, first.hand_over(), tags(oci_settings.installation))
    with pytest.raises(EnvironmentOverLimit, match="disk limit of 67108864 bytes"):
        environment.run("dd if=/dev/zero of=/big bs=1M count=200; sleep 30", timeout_s=40)
    environment.destroy()


def test_what_a_set_up_left_running_is_not_reset_by_the_next_owner(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec
) -> None:
    spec = tiny.model_copy(update={"setup": ("sleep 1000 > /dev/null 2>&1 &",)})
    first = oci.create(spec, ahead(oci_settings), timeout_s=30)
    second = oci.take_over(spec, first.hand_over(), tags(oci_settings.installation))
    assert not second.reset().clean
    second.destroy()


def test_both_sides_are_what_changes_hands(oci: OciProvider, first: OciEnvironment) -> None:
    assert isinstance(first, Transferable)
    assert isinstance(oci, Taking)
    first.destroy()


def test_one_that_is_ended_while_it_changes_hands_is_ended_by_whoever_takes_it(
    oci: OciProvider,
    oci_settings: Settings,
    tiny: EnvironmentSpec,
    first: OciEnvironment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection_to = handing.connection_to

    def ended_meanwhile(address: Path) -> int:
        connection = connection_to(address)
        first.fail("it wrote too much")
        return connection

    monkeypatch.setattr(handing, "connection_to", ended_meanwhile)
    ticket = first.hand_over()
    with pytest.raises(EnvironmentVanished, match="ended before it was taken over"):
        oci.take_over(tiny, ticket, tags(oci_settings.installation))
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(ticket.descriptors[0])
    assert (left_over(oci_settings.home), alive(oci_settings.home)) == ([], [])


@pytest.mark.parametrize("kind", [OciProvider, DockerProvider, QuickestProvider])
def test_a_host_that_can_take_nothing_over_closes_the_tickets_files(
    kind: Callable[..., Taking], oci_settings: Settings, tiny: EnvironmentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider, "runtime_of", lambda home: None)
    file = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(StationError):
        kind(oci_settings, fetch_bundle=lambda bundle: b"").take_over(
            tiny, Ticket("oci" if kind is OciProvider else "docker", {}, (file,)), tags(oci_settings.installation)
        )
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(file)


def test_whether_an_image_is_here_is_told_without_fetching_it(oci: OciProvider, tiny: EnvironmentSpec) -> None:
    assert isinstance(oci, Looking)
    assert oci.has_image(tiny)
    begun = time.monotonic()
    assert not oci.has_image(EnvironmentSpec(image="127.0.0.1:9/nowhere:1"))
    recipe = Build(context=Bundle(sha256="0" * 64, size_bytes=1))
    assert not oci.has_image(EnvironmentSpec(build=recipe))
    assert time.monotonic() - begun < 5


def test_a_fork_closes_what_its_parent_copied_mounts_from(
    oci_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, parents = os.pipe()
    os.set_blocking(reading, False)
    copied: dict[Any, int] = {(0, None): parents}
    monkeypatch.setattr(namespace, "_plain", copied)  # as just after a fork
    namespace.apart(lambda: None, needs=oci_settings.home)
    assert (0, None) not in copied
    assert os.read(reading, 1) == b"", "nobody could write any more"
    for own in (reading, *copied.values()):
        os.close(own)
