"""What is the local environment's own: what it refuses, and ports of this host that end with it."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from pathlib import Path

import pytest

from app.environments.runtimes.local import LocalProvider
from app.environments.sweeper import Sweeper
from app.errors import NoPlaceToStart, SetupFailed, SetupTimedOut, SpecInvalid
from app.host.slots import HostSemaphore
from app.models.spec import Build, Bundle, EnvironmentKind, EnvironmentSpec, Reuse
from app.settings import Settings
from megaflow.contract.environments.ground import tags_of, tar_of

CONTEXT = tar_of({"setup.sh": b"true\n"})
BUNDLE = Bundle(sha256=hashlib.sha256(CONTEXT).hexdigest(), size_bytes=len(CONTEXT))
SPEC = EnvironmentSpec(kind=EnvironmentKind.LOCAL, build=Build(context=BUNDLE))


def test_a_folder_is_not_shared(tmp_path: Path) -> None:
    provider = LocalProvider(Settings(home=tmp_path), fetch_bundle=lambda bundle: pytest.fail("nothing is fetched"))
    with pytest.raises(SpecInvalid, match="shared-readonly"):
        provider.create(SPEC.model_copy(update={"reuse": Reuse.SHARED_READONLY}), tags_of("test"), timeout_s=5)
    assert list(tmp_path.iterdir()) == []


def test_no_place_among_those_that_start_is_told_from_other_failures(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, environment_starts=1)
    provider = LocalProvider(settings, fetch_bundle=lambda bundle: CONTEXT)
    starting = HostSemaphore(tmp_path / "run" / "slots")
    with (
        starting.hold(f"environment_starts:{socket.gethostname()}", 1, timeout_s=5),
        pytest.raises(NoPlaceToStart, match="within 1 s"),
    ):
        provider.create(SPEC, tags_of("test"), timeout_s=1)
    provider.create(SPEC, tags_of("test"), timeout_s=20).destroy()
    assert list((tmp_path / "local").iterdir()) == []


@pytest.mark.parametrize(("command", "error"), [("echo sorry; exit 3", SetupFailed), ("sleep 60", SetupTimedOut)])
def test_a_set_up_that_is_not_done_leaves_nothing(tmp_path: Path, command: str, error: type[Exception]) -> None:
    provider = LocalProvider(Settings(home=tmp_path), fetch_bundle=lambda bundle: CONTEXT)
    provider.prepare_image(SPEC, timeout_s=20)
    begun = time.monotonic()
    with pytest.raises(error, match=command):
        provider.create(SPEC.model_copy(update={"setup": (command,)}), tags_of("test"), timeout_s=2)
    assert time.monotonic() - begun < 30
    assert list((tmp_path / "local").iterdir()) == []


def test_a_port_ends_with_its_environment(tmp_path: Path) -> None:
    provider = LocalProvider(Settings(home=tmp_path), fetch_bundle=lambda bundle: CONTEXT)
    environment = provider.create(SPEC, tags_of("test"), timeout_s=20)
    forward = environment.forward(0, lambda connection: connection.sendall(b"here"))
    with socket.create_connection(("127.0.0.1", forward.port), 5) as caller:
        assert caller.recv(10) == b"here"
    environment.destroy()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", forward.port), 5).close()


def test_what_a_killed_maker_or_ender_left_without_a_word_whose_it_is_goes_when_it_is_old(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "h", docker_url="unix:///nonexistent/d.sock")
    young, bare, half = (settings.home / "local" / name for name in ("young", "bare", "half"))
    for folder in (young, bare, half):
        (folder / "root").mkdir(parents=True)
    (half / "owner.json").write_text('{"megafl')
    for folder in (bare, half):
        os.utime(folder, (time.time() - 120, time.time() - 120))
    assert Sweeper(settings).sweep(set()).removed == 2
    assert [path.name for path in young.parent.iterdir()] == ["young"]
