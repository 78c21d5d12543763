"""On a host without a daemon: killed workers leave nothing, other processes end environments, layers are linked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.environments.runtimes.oci import OciProvider, specification
from app.environments.sweeper import Sweeper
from app.errors import EnvironmentFailed, SetupFailed
from app.host import disk, environment_records, trees
from app.host.disk import DiskUsage
from app.models.spec import EnvironmentSpec, Reuse
from app.settings import Settings
from megaflow.contract.environments.fixture import sweep_all
from tests.integration.docker_fixture import tags_of
from tests.integration.oci_fixture import MEBI, alive, left_over


def deep(folder: Path, levels: int) -> None:
    """Folders in each other, and a file of 64 KiB in the lowest."""
    folder.mkdir()
    here = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("a folder", dir_fd=here)
        below = os.open("a folder", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    file = os.open("bottom", os.O_WRONLY | os.O_CREAT, dir_fd=here)
    os.write(file, bytes(64 * KIBI))
    os.fsync(file)
    os.close(file)
    os.close(here)


WORKER = """
import sys, threading
from pathlib import Path
from app.environments.runtimes.oci import OciProvider
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from tests.integration.docker_fixture import tags_of

settings = Settings(home=Path(sys.argv[1]), installation=sys.argv[2], docker_url="unix:///nowhere")
provider = OciProvider(settings, fetch_bundle=lambda bundle: b"")
spec = EnvironmentSpec(image=sys.argv[3], setup=("echo made > /made",) if sys.argv[4] == "set-up" else ())

def work():
    while True:
        environment = provider.create(spec, tags_of(settings.installation), timeout_s=30)
        environment.run("sleep 100 & echo x > /x", timeout_s=10)
        environment.reset()
        environment.destroy()

provider.store
print("ready", flush=True)
workers = [threading.Thread(target=work) for _ in range(3)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
"""


@pytest.mark.parametrize(("what", "after_s"), [("plain", 0.01), ("plain", 0.06), ("plain", 0.23), ("set-up", 0.11)])
def test_a_worker_killed_at_any_moment_leaves_what_a_sweep_removes(
    oci: OciProvider,
    oci_settings: Settings,
    tiny: EnvironmentSpec,
    monkeypatch: pytest.MonkeyPatch,
    after_s: float,
    what: str,
) -> None:
    words = [str(oci_settings.home), oci_settings.installation, str(tiny.image), what]
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, *words], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as worker:
        assert worker.stdout is not None
        assert b"ready\n" in iter(worker.stdout.readline, b"")
        time.sleep(after_s)
        worker.kill()
    # Who was killed before it could say whose it is counts at once.
    monkeypatch.setattr(environment_records, "_YOUNG_S", 0.0)
    sweep_all(oci_settings)
    assert left_over(oci_settings.home) == []
    assert alive(oci_settings.home) == []
    after = oci.create(tiny, tags_of(oci_settings.installation), timeout_s=30)
    assert after.run("true", timeout_s=10).ok
    after.destroy()


def test_another_process_ends_an_environment_with_a_running_command(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec
) -> None:
    tags = tags_of(oci_settings.installation)
    environment = oci.create(tiny, tags, timeout_s=30)
    environment.run("sleep 1000 > /dev/null 2>&1 & sleep 1000 > /dev/null 2>&1 &", timeout_s=10)
    assert Sweeper(oci_settings).sweep({tags.instance_id}).removed == 0
    assert sweep_all(oci_settings.model_copy(update={"installation": "another"})) == 0
    assert environment.run("true", timeout_s=10).ok
    assert Sweeper(oci_settings).sweep(set(), ended={tags.instance_id}).removed == 1
    assert alive(oci_settings.home) == []
    with pytest.raises(EnvironmentFailed, match="removed from outside"):
        environment.run("true", timeout_s=5)
    environment.destroy()


def test_an_adopted_environment_is_its_new_owners(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec
) -> None:
    environment = oci.create(tiny, tags_of("test-first"), timeout_s=30)
    environment.adopt(tags_of(oci_settings.installation))
    assert sweep_all(oci_settings.model_copy(update={"installation": "test-first"})) == 0
    assert [record.id for record in oci._site.records.all()] == [environment.id]
    assert sweep_all(oci_settings) == 1
    environment.destroy()


@pytest.fixture
def shared(tiny: EnvironmentSpec) -> EnvironmentSpec:
    return tiny.model_copy(update={"reuse": Reuse.SHARED_READONLY})


def test_nothing_can_be_written_but_in_memory_and_no_more_than_fits(
    oci: OciProvider, shared: EnvironmentSpec, oci_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specification, "SCRATCH_BYTES", 4 * MEBI)
    environment = oci.create(shared, tags_of(oci_settings.installation), timeout_s=30)
    for place in ("/x", "/testbed/x", "/etc/hosts", "/root/x"):
        told = environment.run(f"echo x >> {place}", timeout_s=10)
        assert b"Read-only" in told.stderr, place
    for folder in ("/tmp", "/var/tmp", "/run"):
        assert environment.run(f"echo x > {folder}/x && cat {folder}/x", timeout_s=10).stdout == b"x\n"
        full = environment.run(f"dd if=/dev/zero of={folder}/big bs=1M count=8", timeout_s=10)
        assert b"No space" in full.stderr, folder
    assert environment.run("cd /testbed && pwd; echo > /dev/null", timeout_s=10).ok
    environment.destroy()


def test_set_up_commands_may_write_and_what_follows_may_not(
    oci: OciProvider, shared: EnvironmentSpec, oci_settings: Settings
) -> None:
    spec = shared.model_copy(update={"setup": ("echo made > made",)})
    for path in ("cold", "snapshot"):
        environment = oci.create(spec, tags_of(oci_settings.installation), timeout_s=30)
        assert environment.describe()["path"] == path
        assert environment.get("/testbed/made") == b"made\n"
        assert not environment.run("echo changed > made", timeout_s=10).ok
        environment.destroy()


def test_set_up_commands_that_leave_more_than_files_are_refused(
    oci: OciProvider, shared: EnvironmentSpec, oci_settings: Settings
) -> None:
    spec = shared.model_copy(update={"setup": ("sleep 1000 > /dev/null 2>&1 &",)})
    for reason in ("processes are running", "found before"):
        with pytest.raises(SetupFailed, match=reason):
            oci.create(spec, tags_of(oci_settings.installation), timeout_s=30)
    other = spec.model_copy(update={"reuse": Reuse.FRESH})
    oci.create(other, tags_of(oci_settings.installation), timeout_s=30).destroy()
    assert left_over(oci_settings.home) == []


KIBI = 1 << 10


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kept").write_bytes(bytes(100 * KIBI))
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "link").symlink_to(tmp_path / "other")
    assert DiskUsage.of(tmp_path / "top").size_bytes < 50 * KIBI
    assert trees.remove(tmp_path / "top") == 1
    assert (tmp_path / "other" / "kept").exists()


def test_what_no_path_leads_to_counts_and_goes(tmp_path: Path) -> None:
    deep(tmp_path / "top", 1200)
    found = DiskUsage.of(tmp_path / "top")
    assert (found.size_bytes >= 64 * KIBI, found.files) == (True, 1201)
    assert trees.remove(tmp_path / "top") == 1201
    assert list(tmp_path.iterdir()) == []
    assert (trees.remove(tmp_path / "top"), DiskUsage.of(tmp_path / "top")) == (0, DiskUsage())


def test_a_folder_that_moves_while_it_is_looked_at_hides_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tmp_path / "top"
    for name in ("a", "b", "c"):
        deep(top / name, 3) if top.exists() else (top.mkdir(), deep(top / name, 3))
    whole = DiskUsage.of(top).size_bytes
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "unseen").write_bytes(bytes(900 * KIBI))
    enter, moved = disk._Walk._enter, []

    def moving(self: disk._Walk, handle: int, name: str) -> None:
        enter(self, handle, name)
        if not moved and (lowest := next(top.glob("?/a folder/a folder/a folder/bottom"), None)) and name == "a folder":
            moved.append(lowest)
            way = os.readlink(f"/proc/self/fd/{handle}")
            os.rename(way, tmp_path / "elsewhere" / "taken")

    monkeypatch.setattr(disk._Walk, "_enter", moving)
    found = DiskUsage.of(top).size_bytes
    assert moved
    assert whole - 100 * KIBI <= found <= whole, "two of three are counted, and nothing from outside"
    assert found >= 2 * 64 * KIBI
