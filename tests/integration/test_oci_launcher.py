"""Our own launcher: what it starts is confined as by crun, and what it cannot do is said and leaves nothing."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from app.environments import compiling
from app.environments.oci import OciEnvironment, OciProvider, launching, spawning, steps, trial
from app.environments.oci.cgroups import Cgroup
from app.environments.oci.launching import Launcher
from app.environments.oci.store import SNAPSHOT_MARK
from app.errors import DiskFull, EnvironmentFailed, ImageUnfit
from app.models.spec import EnvironmentSpec, Reuse
from app.settings import Settings
from tests.integration.oci_ground import add_image, alive, left_over, tags
from tests.integration.oci_ground import oci as oci
from tests.integration.oci_ground import oci_cache as oci_cache
from tests.integration.oci_ground import oci_programs as oci_programs
from tests.integration.oci_ground import oci_settings as oci_settings
from tests.integration.oci_ground import tiny as tiny
from tests.integration.test_oci_environment import untried


def by_crun(settings: Settings) -> OciProvider:
    return OciProvider(settings.model_copy(update={"container_runtime": "crun"}), fetch_bundle=lambda bundle: b"")


@contextmanager
def started(oci: OciProvider, spec: EnvironmentSpec, settings: Settings) -> Iterator[OciEnvironment]:
    environment = oci.create(spec, tags(settings.installation), timeout_s=30)
    try:
        yield environment
    finally:
        environment.destroy()


# --- As by crun -------------------------------------------------------------------------------------------------------

_OWN = re.compile(r"megaflow-[0-9a-f]{32}|(?<=[ug]id=)\d+|:\[\d+\]")
"""What differs from one environment to the next."""
_FLAGS = frozenset({"ro", "nosuid", "nodev", "noexec"})


def mounts(environment: OciEnvironment) -> dict[str, tuple[str, str, frozenset[str], frozenset[str]]]:
    """By place: what is mounted there (its kind, which part), what is forbidden, and what only its kind knows."""
    found = {}
    for line in environment.run("cat /proc/self/mountinfo", timeout_s=10).text().splitlines():
        about, _, more = _OWN.sub("", line).partition(" - ")
        _, _, _, part, place, flags, *_ = about.split()
        kind, _, words = more.split()
        known = frozenset(words.split(",")) - {"ro", "rw"}
        found[place] = (kind, part, frozenset(flags.split(",")) & _FLAGS, known)
    return found


def shown(environment: OciEnvironment) -> dict[str, str]:
    """What a process inside sees of itself and around it."""
    commands = {
        "status": "cat /proc/self/status",
        "first": "cat /proc/1/status",
        "limits": "cat /proc/1/limits",
        "score": "cat /proc/1/oom_score_adj",
        "devices": "stat -c '%n %F %a %u %g %t %T' /dev /dev/*; readlink /dev/fd /dev/stdin /dev/ptmx /dev/core",
        "files": "for one in /proc/1/fd/*; do readlink $one; done",
        "sysctl": "cat /proc/sys/net/ipv4/ping_group_range /proc/sys/net/ipv4/ip_unprivileged_port_start",
        "network": "cat /proc/net/dev",
        "names": "hostname; id; env; pwd; tr '\\0' '\\n' < /proc/1/environ; tr '\\0' ' ' < /proc/1/cmdline",
        "numbers": "stat -c %u /proc/1/root /etc/hosts /testbed; cat /proc/self/setgroups",
        "hidden": "cat /proc/keys /proc/timer_list /proc/interrupts; ls /proc/acpi /sys/firmware",
        "frozen": "echo 1 > /proc/sys/vm/swappiness; echo 1 > /proc/irq/0/smp_affinity; mkdir /sys/fs/cgroup/x",
        "root": "stat -c '%n %F %a %u %g' / /proc /sys /dev /testbed",
    }
    return {
        name: _steady(environment.run(f"({command}) 2>&1", timeout_s=10).text()) for name, command in commands.items()
    }


_PASSING = ("Vm", "FDSize", "Rss", "voluntary", "nonvoluntary", "HugetlbPages")


def _steady(text: str) -> str:
    """Without what differs from one process, or minute, to the next."""
    lines = [line for line in text.splitlines() if not line.startswith(_PASSING)]
    return re.sub(r"socket:\S+", "", "\n".join(lines))


@pytest.mark.parametrize("reuse", [Reuse.RECYCLED, Reuse.SHARED_READONLY])
def test_an_environment_is_as_one_by_crun(
    oci: OciProvider, tiny: EnvironmentSpec, oci_settings: Settings, reuse: Reuse
) -> None:
    spec = tiny.model_copy(update={"reuse": reuse})
    with started(by_crun(oci_settings), spec, oci_settings) as theirs, started(oci, spec, oci_settings) as ours:
        assert theirs.describe()["runtime"].startswith("crun")
        assert ours.describe()["runtime"].startswith("launcher")
        for name, text in shown(theirs).items():
            assert shown(ours)[name].splitlines() == text.splitlines(), name
        expected, found = mounts(theirs), mounts(ours)
        assert list(found) != []
        assert set(found) == set(expected)
        for place, (kind, part, forbidden, known) in expected.items():
            assert (found[place][:2], found[place][3]) == ((kind, part), known), place
            assert found[place][2] >= forbidden, place


def test_namespaces_are_its_own_and_of_its_own_users(
    oci: OciProvider, tiny: EnvironmentSpec, oci_settings: Settings
) -> None:
    with started(oci, tiny, oci_settings) as one, started(oci, tiny, oci_settings) as other:
        first, second = one._body.pid, other._body.pid
        for name in ("user", "mnt", "uts", "pid", "ipc", "net"):
            seen = {os.readlink(f"/proc/{pid}/ns/{name}") for pid in (first, second, os.getpid())}
            assert len(seen) == 3, name
        maps = [
            Path(f"/proc/{pid}/{name}").read_text().split()
            for pid in (first, second)
            for name in ("uid_map", "gid_map")
        ]
        assert (maps[0], maps[2]) == (maps[1], maps[3])
        assert maps[0] != maps[2]
        assert all(one[0] == "0" and one[2] == "65536" and int(one[1]) > 0x7000_0000 for one in maps)
        assert one.run("echo $$ > /dev/shm/x; cat /dev/shm/x", timeout_s=10).ok
        assert not other.run("cat /dev/shm/x", timeout_s=10).ok


def test_a_start_leaves_no_child_behind(oci: OciProvider, tiny: EnvironmentSpec, oci_settings: Settings) -> None:
    with started(oci, tiny, oci_settings) as environment:
        assert environment.reset().clean
        with pytest.raises(ChildProcessError):
            os.waitpid(environment._body._launched.launcher, os.WNOHANG)  # type: ignore[union-attr]


# --- What an image may bring ------------------------------------------------------------------------------------------


def layer(tmp_path: Path, fill: Callable[[Path], object]) -> Path:
    folder = tmp_path / "layer"
    folder.mkdir()
    fill(folder)
    return folder


@pytest.mark.parametrize(
    ("link", "workdir", "found"),
    [
        ("/var/nowhere", "/place", "/var/nowhere"),
        ("nowhere/deep", "/place/inside", "/nowhere/deep/inside"),
        ("../../../../etc", "/place/made", "/etc/made"),
        ("/proc/self/root/tmp", "/place", "/tmp"),
        ("place", "/place", None),
    ],
)
def test_a_working_folder_is_found_behind_links_and_never_outside(
    oci: OciProvider,
    oci_programs: Path,
    oci_settings: Settings,
    tmp_path: Path,
    link: str,
    workdir: str,
    found: str | None,
) -> None:
    extra = layer(tmp_path, lambda folder: (folder / "place").symlink_to(link))
    image_id = add_image(oci.store, {"sha256:programs": oci_programs, "sha256:link": extra})
    spec = EnvironmentSpec(image=image_id, workdir=workdir)
    if found is None:
        with pytest.raises(EnvironmentFailed, match="folder"):
            oci.create(spec, tags(oci_settings.installation), timeout_s=30)
    else:
        with started(oci, spec, oci_settings) as environment:
            assert environment.run("pwd -P; stat -c %u .", timeout_s=10).text() == f"{found}\n0\n"
    assert left_over(oci_settings.home) == []


def test_a_file_in_the_place_of_the_working_folder_is_named(
    oci: OciProvider, oci_programs: Path, oci_settings: Settings, tmp_path: Path
) -> None:
    extra = layer(tmp_path, lambda folder: (folder / "place").write_text("a file"))
    image_id = add_image(oci.store, {"sha256:programs": oci_programs, "sha256:file": extra})
    with pytest.raises(EnvironmentFailed, match="/place"):
        oci.create(EnvironmentSpec(image=image_id, workdir="/place/x"), tags(oci_settings.installation), timeout_s=30)
    assert left_over(oci_settings.home) == []


@pytest.mark.parametrize("name", ["proc", "sys"])
def test_a_link_in_the_place_of_what_the_kernel_tells_is_refused(
    oci: OciProvider, oci_programs: Path, oci_settings: Settings, tmp_path: Path, name: str
) -> None:
    """In an image it would lie below our own layer; a kept set-up lies above that."""
    extra = layer(tmp_path, lambda folder: (folder / name).symlink_to("tmp"))
    image_id = add_image(oci.store, {"sha256:programs": oci_programs})
    image = oci.store.image(image_id)
    assert image is not None
    kept = oci.store.add_snapshot("key", image, extra, 0)
    assert kept.layers[-1].startswith(SNAPSHOT_MARK)
    oci.store.announce(kept)
    with pytest.raises(EnvironmentFailed, match=f"mount /{name}"):
        oci.create(EnvironmentSpec(image=image_id), tags(oci_settings.installation), timeout_s=30)
    assert (left_over(oci_settings.home), alive(oci_settings.home)) == ([], [])


def test_what_is_no_file_in_the_place_of_the_users_is_not_read(
    oci: OciProvider, oci_programs: Path, oci_settings: Settings, tmp_path: Path
) -> None:
    def fill(folder: Path) -> None:
        (folder / "etc").mkdir()
        os.mkfifo(folder / "etc" / "passwd")

    image_id = add_image(oci.store, {"sha256:programs": oci_programs, "sha256:pipe": layer(tmp_path, fill)})
    with started(oci, EnvironmentSpec(image=image_id), oci_settings) as environment:
        assert environment.run("echo $HOME", timeout_s=10).text() == "/\n"


def test_an_image_without_a_shell_is_named(oci: OciProvider, oci_settings: Settings, tmp_path: Path) -> None:
    extra = layer(tmp_path, lambda folder: (folder / "bin").write_text("not even a folder"))
    image_id = add_image(oci.store, {"sha256:bare": extra})
    with pytest.raises(ImageUnfit, match="no /bin/sh"):
        oci.create(EnvironmentSpec(image=image_id), tags(oci_settings.installation), timeout_s=30)
    assert left_over(oci_settings.home) == []


# --- What goes wrong --------------------------------------------------------------------------------------------------


def saying(words: str) -> Callable[..., int]:
    spawn = spawning.spawn
    return lambda command, *files: spawn(["/bin/sh", "-c", f"printf '{words}' >&2; exit 1"], *files)


@pytest.mark.parametrize(
    ("words", "kind", "found"),
    [
        ("failed 28 new /x/upper: No space left on device", DiskFull, "start environment"),
        ("failed 28 born clone: No space left on device", EnvironmentFailed, "born clone"),
        ("failed 13 born clone: Permission denied", EnvironmentFailed, "born clone: Permission denied"),
        ("failed 0 plan x: no such step", EnvironmentFailed, "plan x: no such step"),
        ("", EnvironmentFailed, r"exit code 1"),
        ("Killed", EnvironmentFailed, "Killed"),
    ],
)
def test_what_the_launcher_says_is_told_and_nothing_is_left(
    oci: OciProvider,
    tiny: EnvironmentSpec,
    oci_settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    kind: type[Exception],
    found: str,
) -> None:
    with started(oci, tiny, oci_settings):
        monkeypatch.setattr(spawning, "spawn", saying(words))
        with pytest.raises(kind, match=found):
            oci.create(tiny, tags(oci_settings.installation), timeout_s=30)
    assert left_over(oci_settings.home) == []


def test_a_zero_inside_is_refused_without_telling_what_is_around_it() -> None:
    with pytest.raises(ValueError, match="'TOKEN'") as told:
        steps._packed([("variable", "TOKEN=secret\0more")])
    assert "secret" not in str(told.value)


def test_one_that_is_killed_while_it_starts_is_none(
    oci: OciProvider, tiny: EnvironmentSpec, oci_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory does for the beginning, and not for what comes then."""
    whole = Cgroup.orders

    def scarce(self: Cgroup, *limits: Any) -> Iterator[tuple[str, ...]]:
        for order in whole(self, *limits):
            value = ("300000",) if "memory" in order[1] and len(order) == 3 else order[2:]
            yield (*order[:2], *value)

    oci.create(tiny, tags(oci_settings.installation), timeout_s=30).destroy()
    monkeypatch.setattr(Cgroup, "orders", scarce)
    begun = time.monotonic()
    for _ in range(5):
        with pytest.raises(EnvironmentFailed):
            oci.create(tiny, tags(oci_settings.installation), timeout_s=30)
    assert time.monotonic() - begun < 60
    assert (left_over(oci_settings.home), alive(oci_settings.home)) == ([], [])


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        (b"", "failed 0 plan text"),
        (b"no zero", "failed 0 plan text"),
        (b"dance\0", "failed 0 plan dance: no such step"),
        (b"write\0/x\0", "failed 0 plan write: words are missing"),
        (b"write\0/no/such/file\0x\0", "failed 2 write /no/such/file"),
        (b"argument\0x\0", "failed 0 plan end: nothing was started"),
        (b"argument\0x\0" * 70, "failed 0 plan arguments: too many"),
        (b"variable\0TOKEN=secret\0" * 5000, "failed 0 plan variables: too many"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(oci_settings: Settings, plan: bytes, found: str) -> None:
    text = launching._in_memory(plan)
    ours, said = os.pipe2(os.O_CLOEXEC)
    pid = spawning.spawn([str(Launcher.of(oci_settings.home).program)], {0: said, 1: said, 2: said, 4: text})
    os.close(said)
    told = spawning.last_words(ours, 10.0)
    os.waitpid(pid, 0)
    os.close(ours)
    os.close(text)
    assert (told or b"").decode().startswith(found)


def test_what_cannot_be_spawned_raises(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        spawning.spawn([str(tmp_path / "nothing")], {})
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError, match="No such file"):
            spawning.spawn([str(tmp_path / "nothing")], {5: 0})
    assert len(os.listdir("/proc/self/fd")) == before


# --- Where it is not used ---------------------------------------------------------------------------------------------


def no_launcher(*anything: object, **more: object) -> None:
    raise EnvironmentFailed("the kernel does not like it")


def no_compiler(*anything: object, **more: object) -> Path:
    raise compiling.NotCompiled("no compiler here")


@pytest.mark.parametrize("lacking", ["a kernel for it", "a compiler"])
def test_crun_starts_all_where_the_launcher_cannot(
    oci_settings: Settings, tiny: EnvironmentSpec, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    untried(oci_settings, monkeypatch)
    if lacking == "a compiler":
        monkeypatch.setattr(trial.Launcher, "of", no_compiler)
    else:
        monkeypatch.setattr(trial.Launcher, "start", no_launcher)
    provider = OciProvider(oci_settings, fetch_bundle=lambda bundle: b"")
    assert (trial.found(oci_settings).why_not, trial.found(oci_settings).launcher) == (None, None)
    with started(provider, tiny, oci_settings) as environment:
        assert environment.describe()["runtime"].startswith("crun")
        assert environment.run("true", timeout_s=10).ok
    assert list((oci_settings.home / "run").glob("oci-trial-*")) == []


def notes(settings: Settings) -> list[Path]:
    return list((settings.home / "run").glob("oci-allowed-*"))


def test_a_moments_want_takes_no_protection_away_for_good(
    oci_settings: Settings, tiny: EnvironmentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    untried(oci_settings, monkeypatch)
    with monkeypatch.context() as short:
        short.setattr(trial.Launcher, "start", no_memory)
        found = trial.found(oci_settings)
        assert (found.users_apart, found.launcher, notes(oci_settings)) == (True, None, [])
    clock = trial.time.monotonic
    monkeypatch.setattr(trial.time, "monotonic", lambda: clock() + 61.0)
    assert trial.found(oci_settings).launcher is not None
    assert len(notes(oci_settings)) == 1


def no_memory(*anything: object, **more: object) -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_note_that_is_torn_is_none(oci_settings: Settings, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (note,) = notes(oci_settings)
    note.write_text(text)
    monkeypatch.setattr(trial, "_known", {})
    assert trial.found(oci_settings).launcher is not None
    assert text != note.read_text()


def test_a_program_that_others_could_have_written_is_not_run(
    oci_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Launcher.of(oci_settings.home).program
    mode = program.stat().st_mode
    program.chmod(0o777)
    try:
        untried(oci_settings, monkeypatch)
        found = trial.found(oci_settings)
        assert (found.why_not, found.launcher) == (None, None)
    finally:
        program.chmod(mode)


def test_its_program_needs_no_libraries(oci_settings: Settings) -> None:
    told = subprocess.run(
        ["ldd", str(Launcher.of(oci_settings.home).program)], capture_output=True, text=True, check=False
    )
    assert "not a dynamic executable" in told.stdout + told.stderr
