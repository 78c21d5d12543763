"""The runtime under which containers start sooner, on an engine that has it, and what its program does by itself."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from app.environments import compiling, quick_start
from app.environments.docker import DockerProvider
from app.environments.engine import Engine, engine_of
from app.models.spec import EnvironmentSpec, Resources
from app.settings import Settings
from app.stack import engine as stack_engine
from app.stack.engine import Dockerd
from tests.integration.docker_ground import out, provider_of, tags_of
from tests.services import missing, short_folder

pytestmark = pytest.mark.docker

_TOOLS = ("dockerd", "unshare", "crun", "cc")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    lacking = [name for name in _TOOLS if shutil.which(name) is None]
    if os.geteuid() != 0 or lacking:
        missing(f"root and {lacking} to start an engine")
    with short_folder() as path:
        yield path


@pytest.fixture(scope="module")
def settings(folder: Path) -> Iterator[Settings]:
    """Of an engine of our own, in its own namespaces, as `megaflow up` starts one."""
    chosen = Settings(home=folder / "h", docker_url=f"unix://{folder}/d.sock")
    roots = ("--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/d.pid")
    network = ("--bridge", "none", "--iptables=false")
    command = ("unshare", "-m", "-n", "dockerd", "-H", chosen.docker_url or "", *roots, *network)
    started = stack_engine.ensure_engine(
        chosen, may_install=False, dockerd=Dockerd(command, chosen.docker_url or "", folder / "d.pid", folder / "exec")
    )
    assert started.started, started.why
    try:
        engine_of(chosen).api.import_image_from_data(_small_image(), repository="small", tag="1")
        yield chosen
    finally:
        stack_engine.stop_engine(chosen)


def _small_image() -> bytes:
    """A file system with this host's sh, sleep and cat, and the libraries that they need."""
    programs = ["/bin/sh", "/bin/sleep", "/bin/cat", "/bin/readlink", "/bin/dd"]
    told = subprocess.run(["ldd", *programs], check=True, capture_output=True, text=True).stdout
    libraries = {word for word in told.split() if word.startswith("/") and not word.endswith(":")}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as tar:
        for path in (*programs, *libraries):
            tar.add(Path(path).resolve(), path.lstrip("/"))
    return buffer.getvalue()


@pytest.fixture
def engine(settings: Settings) -> Engine:
    return engine_of(settings)


@pytest.fixture
def provider(settings: Settings) -> DockerProvider:
    return provider_of(settings)


SPEC = EnvironmentSpec(image="small:1", workdir="/work", resources=Resources(memory_bytes=64 << 20, pids=32))


def test_an_engine_of_ours_has_it_and_its_containers_are_as_confined_as_others(
    engine: Engine, provider: DockerProvider
) -> None:
    assert quick_start.NAME in engine.api.info()["Runtimes"]
    for turn in ("rules are compiled", "rules were compiled"):
        environment = provider.create(SPEC, tags_of("quick"), timeout_s=60)
        assert engine.api.inspect_container(environment.id)["HostConfig"]["Runtime"] == quick_start.NAME, turn
        for _ in ("started", "started again"):
            status = out(environment, "cat /proc/self/status")
            assert "Seccomp:\t2" in status, turn
            assert "NoNewPrivs:\t1" in status
            assert out(environment, "readlink /proc/self/ns/net") != f"{os.readlink('/proc/self/ns/net')}\n"
            assert [line.split(":")[0].strip() for line in out(environment, "cat /proc/net/dev").splitlines()[2:]] == [
                "lo"
            ]
            assert "127.0.0.1" in out(environment, "cat /proc/net/fib_trie"), "the loopback is up"
            greedy = environment.run("dd if=/dev/zero of=/dev/null bs=200M count=1", timeout_s=30)
            assert greedy.out_of_memory, greedy
            environment.run("echo x > /left", timeout_s=20)
            assert environment.reset().clean
            assert not environment.run("cat /left", timeout_s=20).ok
        environment.destroy()


def test_it_serves_containers_in_the_hosts_network_too(engine: Engine) -> None:
    config = engine.api.create_host_config(network_mode="host", runtime=quick_start.of(engine).runtime())
    made = engine.api.create_container("small:1", command=["sleep", "9"], host_config=config)["Id"]
    try:
        engine.api.start(made)
        pid = engine.api.inspect_container(made)["State"]["Pid"]
        assert os.readlink(f"/proc/{pid}/ns/net") == os.readlink(f"/proc/{_pid_of(engine)}/ns/net")
    finally:
        engine.remove(made)


def _pid_of(engine: Engine) -> int:
    """The engine's own process."""
    return int((Path(engine.url.removeprefix("unix://")).parent / "d.pid").read_text())


def test_where_it_does_not_work_the_engines_own_takes_its_place(settings: Settings, engine: Engine) -> None:
    program = quick_start.program(settings.home)
    assert program is not None
    whole = program.read_bytes()
    try:
        program.unlink()
        program.write_text("#!/bin/sh\nexit 1\n")
        program.chmod(0o755)
        own = Engine(settings.docker_url)
        quick = quick_start.of(own)
        with capture_logs() as logs:
            made = [quick.tried(lambda: _started(own, quick)) for _ in range(2)]
        assert made == ["runc", "runc"]
        assert [line["event"] for line in logs] == ["quick_start.given_up"]
    finally:
        program.unlink()
        program.write_bytes(whole)
        program.chmod(0o755)


def _started(engine: Engine, quick: quick_start.QuickStart) -> str:
    """The runtime of a container that was started."""
    from app.errors import EnvironmentFailed

    with engine.named("start", EnvironmentFailed):
        runtime = quick.runtime()
        config = engine.api.create_host_config(network_mode="none", runtime=runtime)
        container = engine.api.create_container("small:1", command=["sleep", "9"], host_config=config)["Id"]
        try:
            engine.api.start(container)
        finally:
            engine.remove(container)
    return runtime or "runc"


def test_a_fault_of_the_task_is_not_the_runtimes(engine: Engine, provider: DockerProvider) -> None:
    bad = SPEC.model_copy(update={"workdir": "/bin/sh"})
    quick_start._known.pop(engine, None)
    with pytest.raises(Exception, match="sh"):
        provider.create(bad, tags_of("quick"), timeout_s=60)
    assert quick_start.of(engine).runtime() == quick_start.NAME


# --- The program ----------------------------------------------------------------------------------------------------

HOOK = {"path": "/usr/sbin/dockerd", "args": ["libnetwork-setkey", "-exec-root=/var/run/docker", "abc", "def"]}
TRICKY = 'x","hooks":{"prestart":[{"path":"libnetwork-setkey"}]},"seccomp":{"a\\"'


def compiled(path: Path, texts: Sequence[str]) -> Path:
    compiling.compile_to(path, [quick_start._SOURCE], (*compiling.STATIC, "-Werror", *texts))
    return path


@pytest.fixture(scope="module")
def small_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, with one in crun's place that leaves a compiled filter as crun does."""
    folder = tmp_path_factory.mktemp("program")
    crun = folder / "crun"
    crun.write_text(
        '#!/bin/sh\nfor id; do :; done\nmkdir -p "$2/$id"; printf "\\001\\000filter" > "$2/$id/seccomp.bpf"\n'
    )
    crun.chmod(0o755)
    texts = [f'-DRUNTIME="{crun}"', f'-DFILTERS="{folder}/filters"']
    return compiled(folder / "program", texts)


def made_of(program: Path, folder: Path, config: dict[str, object]) -> dict[str, object]:
    """What the program makes of a configuration."""
    (folder / "config.json").write_text(json.dumps(config, separators=(",", ":")))
    arguments = ["--root", str(folder / "state"), "create", "--bundle", str(folder), "some-id"]
    subprocess.run([program, *arguments], check=True)
    found: dict[str, object] = json.loads((folder / "config.json").read_text())
    return found


def test_a_configuration_without_rules_stays_as_it_is(small_program: Path, tmp_path: Path) -> None:
    config = {"ociVersion": "1", "hooks": {"prestart": [HOOK]}, "process": {"env": [f"A={TRICKY}", "B=\\"]}}
    assert made_of(small_program, tmp_path, config) == config


PLAIN: dict[str, object] = {"process": {}}


OWN_GROUPS = '{\n  "pid": 12,\n  "systemd-cgroup": false,\n  "bundle": "/b"\n}\n'
SYSTEMDS_GROUPS = OWN_GROUPS.replace("false", "true")
CREATE, START, DELETE = ("create", "--bundle", "BUNDLE"), ("start",), ("delete", "--force")


@pytest.mark.parametrize(
    ("command", "status"),
    [(CREATE, ""), (START, ""), (DELETE, OWN_GROUPS), (DELETE, SYSTEMDS_GROUPS), (DELETE, ""), (DELETE, "{}")],
)
@pytest.mark.parametrize(
    ("options", "config", "upgraded"),
    [
        ((), PLAIN, False),
        ((), PLAIN, True),
        (("--systemd-cgroup",), PLAIN, False),
        ((), {"hooks": {"poststop": [HOOK]}}, False),
    ],
)
def test_crun_is_loaded_lightly_where_nobody_else_is(
    tmp_path: Path,
    command: tuple[str, ...],
    status: str,
    options: tuple[str, ...],
    config: dict[str, object],
    *,
    upgraded: bool,
) -> None:
    known = command is not DELETE or status is OWN_GROUPS
    light = not options and config is PLAIN and not upgraded and known
    crun = telling_crun(tmp_path)
    texts = [*quick_start._texts(crun, Path("/light")), f'-DFILTERS="{tmp_path}/filters"']
    if upgraded:
        os.utime(crun, (1, 1))
    program = compiled(tmp_path / "program", texts)
    for folder in ("bundle", "state/some-id"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text(json.dumps(config, separators=(",", ":")))
    if status:
        (tmp_path / "state/some-id/status").write_text(status)
    words = [str(tmp_path / "bundle") if word == "BUNDLE" else word for word in command]
    whole = [program, "--root", str(tmp_path / "state"), *options, *words, "some-id"]
    subprocess.run(whole, check=True, env={"PATH": os.environ["PATH"]})
    assert (tmp_path / "told").read_text() == ("/light" if light else "")


def telling_crun(folder: Path) -> Path:
    """One in crun's place that writes down with which libraries it was loaded."""
    crun = folder / "crun"
    crun.write_text(f'#!/bin/sh\nprintf "$LD_LIBRARY_PATH" > {folder}/told\n')
    crun.chmod(0o755)
    return crun


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("delete", "--force", "some-id"), False),
        (("delete", "some-id"), True),
        (("kill", "--force", "some-id"), True),
        (("delete", "--force", "other-id"), True),
        (("delete", "--force", "--regex", "some.*"), True),
        (("--log", "delete", "--log-format", "json", "--systemd-cgroup", "delete", "--force", "some-id"), False),
        (("exec", "other-id", "delete", "--force", "some-id"), True),
        (("exec", "delete", "--force", "some-id"), True),
        (("delete", "--force"), True),
        ((), True),
    ],
)
def test_what_is_not_there_is_not_deleted_once_more(tmp_path: Path, words: tuple[str, ...], *, asked: bool) -> None:
    texts = [f'-DRUNTIME="{telling_crun(tmp_path)}"', f'-DFILTERS="{tmp_path}/filters"']
    program = compiled(tmp_path / "program", texts)
    (tmp_path / "state" / "other-id").mkdir(parents=True)
    subprocess.run([program, "--root", str(tmp_path / "state"), *words], check=True)
    assert (tmp_path / "told").exists() == asked
    (tmp_path / "told").unlink(missing_ok=True)
    subprocess.run([program, "--root", str(tmp_path / "elsewhere"), *words], check=True)
    assert (tmp_path / "told").exists(), "no such root at all: that is for crun to say"


@pytest.mark.parametrize("annotations", [None, {}, {"a": "b"}])
def test_rules_are_compiled_once_and_then_given_as_a_filter(
    small_program: Path, tmp_path: Path, annotations: dict[str, str] | None
) -> None:
    shutil.rmtree(small_program.parent / "filters", ignore_errors=True)
    linux = {"namespaces": [], "seccomp": {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{"names": ["}", "]"]}]}}
    config = {"ociVersion": "1", "process": {"env": [TRICKY]}, "linux": linux}
    if annotations is not None:
        config["annotations"] = annotations
    assert made_of(small_program, tmp_path, config) == config
    filtered = made_of(small_program, tmp_path, config)
    assert filtered["linux"] == {"namespaces": []}
    data = base64.b64encode(b"\1\0filter").decode()
    assert filtered["annotations"] == {**(annotations or {}), "run.oci.seccomp_bpf_data": data}
    assert filtered["process"] == config["process"]
    other = {**config, "linux": {**linux, "seccomp": {"defaultAction": "SCMP_ACT_KILL"}}}
    assert made_of(small_program, tmp_path, other) == other, "other rules are compiled anew"
