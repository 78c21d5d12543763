"""Users of an environment without a daemon are nobody on the host, and files keep their owners all the same."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from app.environments.isolation import users
from app.environments.prebuilt import binary
from app.environments.runtimes.oci import OciEnvironment, OciProvider, probe
from app.host import kernel
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from tests.integration.oci_fixture import create
from tests.services import missing


@pytest.fixture(autouse=True)
def able(oci_settings: Settings) -> None:
    if (why_not := probe.available(oci_settings)) is not None:
        missing(f"a host that makes environments without a daemon ({why_not})")


def number_outside(environment: OciEnvironment) -> int:
    """By which number of this host the environment's root runs."""
    status = Path(f"/proc/{environment._body.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("Uid:")]
    (number,) = set(line.split()[1:])
    return int(number)


def test_root_inside_is_nobody_outside_and_each_environment_another_nobody(
    oci: OciProvider, tiny: EnvironmentSpec, oci_settings: Settings, own: OciEnvironment
) -> None:
    other = create(oci, tiny, oci_settings)
    assert own.run("id -u", timeout_s=10).stdout == b"0\n"
    first, second = number_outside(own), number_outside(other)
    assert first >= 1 << 30
    assert abs(first - second) >= users.SIZE
    other.destroy()


def test_nothing_of_the_host_changes_its_owner(own: OciEnvironment) -> None:
    for name in ("null", "zero", "tty", "urandom"):
        assert os.stat(f"/dev/{name}").st_uid == 0, name
    assert own.run("echo x > /dev/null && head -c 2 /dev/zero /dev/urandom", timeout_s=10).ok
    assert own.reset().clean
    assert os.stat("/dev/null").st_uid == 0


def test_what_a_set_up_made_has_its_owners_in_the_next_environment(
    oci: OciProvider, tiny: EnvironmentSpec, oci_settings: Settings
) -> None:
    script = "touch /a; chown 1234:5 /a; rm /bin/tail; mkdir /d; chown 9 /d"
    spec = tiny.model_copy(update={"setup": (script,)})
    first, second = create(oci, spec, oci_settings), create(oci, spec, oci_settings)
    assert second.describe()["path"] == "snapshot"
    assert number_outside(first) != number_outside(second)
    for environment in (first, second):
        told = environment.run("stat -c '%n %u %g' /a /d /testbed; ls /bin/tail", timeout_s=10)
        assert told.stdout == b"/a 1234 5\n/d 9 0\n/testbed 0 0\n"
        environment.destroy()


def test_where_the_kernel_cannot_translate_there_are_no_such_environments(
    oci_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*anything: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(probe, "_known", {})
    for note in (oci_settings.home / "run").glob("oci-apart-*"):
        note.unlink()
    monkeypatch.setattr(kernel, "mount_for", unknown)
    assert "not implemented" in (probe.available(oci_settings) or "")


def test_a_namespace_keeps_no_process_and_needs_a_host_that_lets_it_be_made(oci_settings: Settings) -> None:
    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    before = children()
    made = users.Users.fresh(binary(oci_settings.home))
    try:
        assert os.readlink(f"/proc/self/fd/{made.namespace}") not in ("", os.readlink("/proc/self/ns/user"))
        assert children() <= before
    finally:
        os.close(made.namespace)
    with pytest.raises(OSError, match="user namespace could not be made"):
        users.Users.fresh(Path("/bin/false"))


def test_owners_on_the_disk_are_those_inside(own: OciEnvironment) -> None:
    done = own.run("touch /a; chown 1234:5 /a; mkdir /b; chmod 700 /bin/env; chown 7 /bin/env", timeout_s=10)
    assert done.ok, done.text()
    upper = own._body.place.upper
    found = {name: (upper / name).stat() for name in ("a", "b", "bin/env", "testbed")}
    owners = {name: (about.st_uid, about.st_gid) for name, about in found.items()}
    assert owners == {"a": (1234, 5), "b": (0, 0), "bin/env": (7, 0), "testbed": (0, 0)}
