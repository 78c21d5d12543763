"""Environments without a daemon, started for real: hardening, limits, endings, resets, set-ups kept."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.environments.isolation import spawning
from app.environments.runtimes.oci import OciEnvironment, OciProvider, probe
from app.environments.runtimes.oci.provider import watch_of
from app.environments.runtimes.setup import setup_key
from app.errors import (
    EnvironmentFailed,
    HostDiskFull,
    ImageUnfit,
)
from app.host import disk_watch
from app.host.slots import turn
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from tests.integration.docker_fixture import tags_of
from tests.integration.oci_fixture import add_image, create, left_over


def test_the_images_variables_and_user_hold(oci: OciProvider, oci_programs: Path, oci_settings: Settings) -> None:
    image_id = add_image(oci.store, {"sha256:programs": oci_programs}, Env=["A=image", "B=image"], User="somebody")
    spec = EnvironmentSpec(image=image_id, env={"B": "task"}, workdir="/tmp")
    environment = create(oci, spec, oci_settings)
    assert environment.run('echo "$A $B"; id -u', timeout_s=10).stdout == b"image task\n1234\n"
    environment.destroy()


def test_an_image_of_127_layers_starts(
    oci: OciProvider, tmp_path: Path, oci_programs: Path, oci_settings: Settings
) -> None:
    layers = {"sha256:programs": oci_programs}
    for number in range(126):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        (folder / f"f{number}").touch()
        layers[f"sha256:{number:064x}"[::-1][:64]] = folder
    environment = create(oci, EnvironmentSpec(image=add_image(oci.store, layers)), oci_settings)
    assert environment.run("ls /f0 /f125", timeout_s=10).ok
    environment.destroy()


def test_an_image_without_a_shell_is_named_as_such(oci: OciProvider, tmp_path: Path, oci_settings: Settings) -> None:
    (tmp_path / "bin").mkdir()
    image_id = add_image(oci.store, {"sha256:empty": tmp_path})
    with pytest.raises(ImageUnfit, match="no /bin/sh"):
        create(oci, EnvironmentSpec(image=image_id), oci_settings)
    assert left_over(oci_settings.home) == []


def test_other_users_of_the_host_do_not_reach_the_files(own: OciEnvironment, oci_settings: Settings) -> None:
    modes = {name: (oci_settings.home / name).stat().st_mode & 0o777 for name in ("environments", "images")}
    assert modes == {"environments": 0o700, "images": 0o700}


def test_on_a_full_disk_only_the_largest_of_all_processes_environments_ends(
    oci: OciProvider, tiny: EnvironmentSpec, oci_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = create(oci, tiny, oci_settings), create(oci, tiny, oci_settings)
    for environment, size in ((small, 40), (large, 60)):
        assert environment.run(f"dd if=/dev/zero of=/big bs=1M count={size}", timeout_s=20).ok
    watches = {}  # as if each belonged to a process of its own
    for environment in (small, large):
        watches[environment] = watch_of(oci_settings.home)
        watches[environment]._watched[environment] = disk_watch.LIMIT_BYTES
    oci._watch._watched.clear()
    monkeypatch.setattr(disk_watch, "_RESERVE", 2.0)
    for environment in (small, large, small):
        watches[environment].check()
    assert (small.gone, large.gone) == (False, True)
    with pytest.raises(HostDiskFull, match=r"host's disk is nearly full, and of all it had written most \(\d+ bytes"):
        large.run("true", timeout_s=5)
    assert small.run("true", timeout_s=10).ok
    small.destroy()
    large.destroy()


def test_a_set_up_runs_once_and_its_files_are_in_every_environment(
    oci: OciProvider, tiny: EnvironmentSpec, oci_settings: Settings
) -> None:
    commands = ("cat /proc/sys/kernel/random/uuid > /made", "rm -r /etc; mkdir /etc; echo new > /etc/only")
    spec = tiny.model_copy(update={"setup": commands})
    with ThreadPoolExecutor(3) as threads:
        made = list(threads.map(lambda _: create(oci, spec, oci_settings), range(3)))
    assert len({environment.get("/made") for environment in made}) == 1
    assert made[1].get("/etc/only") == b"new\n"
    with pytest.raises(FileNotFoundError):
        made[1].get("/etc/passwd")
    made[0].run("echo changed > /made", timeout_s=10)
    assert made[0].reset().clean
    assert made[0].get("/made") == made[1].get("/made")
    for environment in made:
        environment.destroy()


def test_a_set_up_that_leaves_a_server_running_is_run_in_every_environment(
    oci: OciProvider, tiny: EnvironmentSpec, oci_settings: Settings
) -> None:
    spec = tiny.model_copy(update={"setup": ("cat /proc/sys/kernel/random/uuid > /made; sleep 60 > /dev/null 2>&1 &",)})
    first, second = create(oci, spec, oci_settings), create(oci, spec, oci_settings)
    assert first.get("/made") != second.get("/made")
    assert b"sleep" in second.run("cat /proc/[0-9]*/comm", timeout_s=10).stdout
    assert not first.reset().clean
    with turn(oci_settings.home / "run" / "slots" / f"oci-setup-{setup_key(spec, tiny.image)[:24]}", timeout_s=1):
        another = OciProvider(oci_settings, fetch_bundle=lambda bundle: b"")
        another.create(spec, tags_of(oci_settings.installation), timeout_s=5).destroy()  # it does not queue
    first.destroy()
    second.destroy()


def test_a_host_without_a_runtime_is_told_what_to_install(
    oci_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    untried(oci_settings, monkeypatch)
    monkeypatch.setattr(probe, "runtime_of", lambda: None)
    assert "`crun`" in (probe.available(oci_settings) or "")
    with pytest.raises(EnvironmentFailed, match="`docker`"):
        _ = OciProvider(oci_settings, fetch_bundle=lambda bundle: b"").store


def untried(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody had ever asked."""
    monkeypatch.setattr(probe, "_known", {})
    for note in (settings.home / "run").glob("oci-apart-*"):
        note.unlink()


def test_who_hangs_at_a_start_is_ended_at_the_deadline(
    oci: OciProvider, tiny: EnvironmentSpec, oci_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(oci, tiny, oci_settings).destroy()  # from here on only the runtime takes long
    spawn = spawning.spawn
    hang = ["/bin/sh", "-c", "sleep 1000 & wait"]
    monkeypatch.setattr(spawning, "spawn", lambda command, *files: spawn(hang, *files))
    begun = time.monotonic()
    with pytest.raises(EnvironmentFailed, match=r"within \d\.\d s; it hung"):
        oci.create(tiny, tags_of(oci_settings.installation), timeout_s=1.0)
    assert 0.9 < time.monotonic() - begun < 30.0
    assert left_over(oci_settings.home) == [], "nor is what it had started"
