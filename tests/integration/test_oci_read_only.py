"""Environments that several tasks share: nothing in them can be changed but some folders in memory."""

from __future__ import annotations

import pytest

from app.environments.runtimes.oci import OciProvider, specification
from app.errors import SetupFailed
from app.models.spec import EnvironmentSpec, Reuse
from app.settings import Settings
from tests.integration.oci_ground import MEBI, left_over, tags
from tests.integration.oci_ground import oci as oci
from tests.integration.oci_ground import oci_cache as oci_cache
from tests.integration.oci_ground import oci_programs as oci_programs
from tests.integration.oci_ground import oci_settings as oci_settings
from tests.integration.oci_ground import tiny as tiny


@pytest.fixture
def shared(tiny: EnvironmentSpec) -> EnvironmentSpec:
    return tiny.model_copy(update={"reuse": Reuse.SHARED_READONLY})


def test_nothing_can_be_written_but_in_memory_and_no_more_than_fits(
    oci: OciProvider, shared: EnvironmentSpec, oci_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specification, "SCRATCH_BYTES", 4 * MEBI)
    environment = oci.create(shared, tags(oci_settings.installation), timeout_s=30)
    for place in ("/x", "/testbed/x", "/etc/hosts", "/root/x"):
        told = environment.run(f"echo x >> {place}", timeout_s=10)
        assert b"Read-only" in told.stderr, place
    for folder in ("/tmp", "/var/tmp", "/run"):
        assert environment.run(f"echo x > {folder}/x && cat {folder}/x", timeout_s=10).stdout == b"x\n"
        full = environment.run(f"dd if=/dev/zero of={folder}/big bs=1M count=8", timeout_s=10)
        assert b"No space" in full.stderr, folder
    assert environment.run("cd /testbed && pwd; echo > /dev/null", timeout_s=10).ok
    environment.destroy()


def test_a_reset_empties_the_folders_in_memory(
    oci: OciProvider, shared: EnvironmentSpec, oci_settings: Settings
) -> None:
    environment = oci.create(shared, tags(oci_settings.installation), timeout_s=30)
    environment.put("/tmp/x", b"left")
    assert environment.reset().clean
    assert environment.run("ls -A /tmp", timeout_s=10).stdout == b""
    assert not environment.run("touch /x", timeout_s=10).ok
    environment.destroy()


def test_set_up_commands_may_write_and_what_follows_may_not(
    oci: OciProvider, shared: EnvironmentSpec, oci_settings: Settings
) -> None:
    spec = shared.model_copy(update={"setup": ("echo made > made",)})
    for path in ("cold", "snapshot"):
        environment = oci.create(spec, tags(oci_settings.installation), timeout_s=30)
        assert environment.describe()["path"] == path
        assert environment.get("/testbed/made") == b"made\n"
        assert not environment.run("echo changed > made", timeout_s=10).ok
        environment.destroy()


def test_set_up_commands_that_leave_more_than_files_are_refused(
    oci: OciProvider, shared: EnvironmentSpec, oci_settings: Settings
) -> None:
    spec = shared.model_copy(update={"setup": ("sleep 1000 > /dev/null 2>&1 &",)})
    for _ in range(2):
        with pytest.raises(SetupFailed, match="processes are running"):
            oci.create(spec, tags(oci_settings.installation), timeout_s=30)
    other = spec.model_copy(update={"reuse": Reuse.FRESH})
    for _ in range(2):
        oci.create(other, tags(oci_settings.installation), timeout_s=30).destroy()
        with pytest.raises(SetupFailed, match="processes are running"):
            oci.create(spec, tags(oci_settings.installation), timeout_s=30)
    assert left_over(oci_settings.home) == []
