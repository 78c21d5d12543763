"""`megaflow shell` as a person uses it: a real terminal, real environments, no stack, and nothing left."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import Result

from app.environments.listing import listed
from app.environments.sweeper import Sweeper
from app.errors import DatasetInvalid, EngineUnavailable, MegaFlowError, SpecInvalid, UnknownName
from app.host.engine import engine_of
from app.ledger.receipts import ObjectKind
from app.models.spec import TOOLS_INSIDE
from app.settings import PREFIX, Settings
from tests.integration.command import CommandLine
from tests.integration.docker_fixture import remove_images
from tests.services import short_folder
from tests.waiting import eventually

COMMAND = [sys.executable, "-c", "from app.cli import main; main()", "shell"]
ON_TERMINAL = ["/bin/sh", "-c", 'exec "$@" < "$0" > "$0" 2>&1']
"""Whoever leads a session and opens a terminal has it from then on. `$0` is the terminal."""
Open = Callable[..., "Terminal"]
Shell = Callable[..., Result]


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """One for all: what the kind `oci` unpacks and compiles is needed once."""
    with short_folder() as folder:
        yield folder / "h"


@pytest.fixture
def settings(home: Path) -> Iterator[Settings]:
    """Whose servers are nowhere: the command must not need any."""
    made = Settings(
        home=home,
        installation=f"test-{uuid.uuid4().hex[:8]}",
        database_url="postgresql:///nothing?host=/nowhere",
        broker_url="redis://127.0.0.1:1",
        artifacts_url="file:///proc/nowhere",
        container_runtime="docker",
    )
    yield made
    with suppress(EngineUnavailable):
        remove_images(engine_of(made), made)


def variables(settings: Settings) -> dict[str, str]:
    foreign = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return foreign | settings.variables() | {"TERM": "xterm-256color"}


def left(settings: Settings) -> list[str]:
    """What stands of the installation: by the engine's own listing, and on this host's disk."""
    found, _ = listed(settings)
    return [thing.name for thing in found if thing.kind is not ObjectKind.VOLUME]


def a_task(
    folder: Path,
    *,
    setup: str = "echo made > made\n",
    image: str | None = None,
    recipe: str = "FROM scratch\n",
    more: str = "",
) -> Path:
    """In Harbor's format; with an image, or to be built by a recipe."""
    (folder / "environment").mkdir(parents=True)
    (folder / "tests").mkdir()
    source = "" if image is None else f'docker_image = "{image}"\n'
    (folder / "task.toml").write_text(
        f'[environment]\nallow_internet = false\nworkdir = "/app"\nenv = {{ GREETING = "hello" }}\n{source}{more}'
    )
    (folder / "instruction.md").write_text("Look around.\n")
    (folder / "environment" / "setup.sh").write_text(f'cd "$WORKDIR"\n{setup}')
    (folder / "tests" / "test.sh").write_text("true\n")
    if image is None and recipe:
        (folder / "environment" / "Dockerfile").write_text(recipe)
    return folder


@pytest.fixture(params=["local", *(pytest.param(kind, marks=pytest.mark.docker) for kind in ("docker", "oci"))])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def look(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A task for environments of this kind."""
    image = None if kind == "local" else request.getfixturevalue("base_image_tag")
    return a_task(tmp_path / "look", image=image)


class Terminal:
    """A terminal of its own, in which `megaflow shell` runs."""

    def __init__(self, settings: Settings, *arguments: object) -> None:
        self.ours, self.theirs = os.openpty()
        self.resize(33, 101)
        self.before = termios.tcgetattr(self.theirs)
        self.process = subprocess.Popen(
            [*ON_TERMINAL, os.ttyname(self.theirs), *COMMAND, *map(str, arguments)],
            env=variables(settings),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def until(self, wanted: bytes, within_s: float = 60) -> bytes:
        """What is shown next, up to this."""
        found, deadline = b"", time.monotonic() + within_s
        while wanted not in found:
            ready, _, _ = select.select([self.ours], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"expected {wanted!r} on the screen, found {found!r}"
            found += os.read(self.ours, 1 << 16)
        return found

    def hang_up(self) -> None:
        if self.ours >= 0:
            os.close(self.ours)
        self.ours = -1

    def close(self) -> None:
        self.hang_up()
        os.close(self.theirs)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)


@pytest.fixture
def opened(settings: Settings) -> Iterator[Open]:
    made: list[Terminal] = []

    def make(*arguments: object) -> Terminal:
        made.append(Terminal(settings, *arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def shell(megaflow: CommandLine) -> Shell:
    """The command in this process."""
    return lambda *arguments, kind="local": megaflow.run("shell", *arguments, "--environment", kind)


@pytest.fixture
def sets(tmp_path: Path) -> str:
    """A dataset of two tasks."""
    for name in ("one", "two"):
        solution = a_task(tmp_path / "set" / name) / "solution"
        solution.mkdir()
        (solution / "solve.sh").write_text("true\n")
    return str(tmp_path / "set")


def ran(settings: Settings, *arguments: object, timeout_s: float = 120) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env=variables(settings),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout_s,
    )


# --- The terminal ---------------------------------------------------------------------------------------------------


def test_a_person_talks_to_a_shell_and_nothing_is_left(kind: str, look: Path, opened: Open, settings: Settings) -> None:
    terminal = opened(look, "--environment", kind)
    terminal.until(b"preparing look")
    terminal.type(b"echo $GREETING-$((40+2)) in $PWD as $TERM\n")
    shown = terminal.until(b"as xterm-256color")
    assert b"hello-42 in " in shown
    assert b"/app as" in shown
    assert len(left(settings)) == 1
    terminal.type(b"stty size\n")
    terminal.until(b"33 101")
    terminal.resize(44, 120)
    terminal.type(b"sleep 0.5; stty size\n")
    terminal.until(b"44 120")
    terminal.type(b"sleep 60.5\n")
    await_command(b"sleep 60.5")
    terminal.type(b"\x03")  # a key as others: it ends what runs in there, not us
    terminal.type(b"echo on-$((1+1))\n")
    terminal.until(b"on-2", within_s=20)
    terminal.type(b"exit 7\n")
    assert terminal.process.wait(60) == 7
    assert left(settings) == []
    assert termios.tcgetattr(terminal.theirs) == terminal.before


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("told", "local"),
        pytest.param("told", "oci", marks=pytest.mark.docker),
        pytest.param("hung up", "docker", marks=pytest.mark.docker),
    ],
    indirect=["kind"],
)
def test_whoever_ends_it_leaves_nothing(how: str, kind: str, look: Path, opened: Open, settings: Settings) -> None:
    terminal = opened(look, "--environment", kind)
    terminal.type(b"echo up-$((1+1)); sleep 61.5\n")
    terminal.until(b"up-2")
    if how == "told":
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.process.wait(60) == 128 + signal.SIGTERM
        assert termios.tcgetattr(terminal.theirs) == terminal.before
    else:
        terminal.hang_up()
        assert terminal.process.wait(60) != 0
    assert left(settings) == []
    assert b"sleep 61.5" not in commands_of_this_host()


def await_command(wanted: bytes) -> None:
    eventually(lambda: wanted in commands_of_this_host(), repr(wanted))


def commands_of_this_host() -> bytes:
    found = b""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += file.read_bytes().replace(b"\0", b" ") + b"\n"
    return found


@pytest.mark.extra
def test_what_a_killed_one_leaves_lives_by_its_deadline_alone(
    kind: str, look: Path, opened: Open, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = opened(look, "--environment", kind, "--timeout", 100)
    terminal.type(b"echo up-$((1+1))\n")
    terminal.until(b"up-2")
    time.sleep(3.5)  # older than what a sweeper takes for just made
    assert Sweeper(settings).sweep(live_instances=set()).removed == 0
    terminal.type(b"echo on-$((1+1))\n")
    terminal.until(b"on-2")
    terminal.process.kill()
    terminal.process.wait(30)
    assert len(left(settings)) == 1
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 600 + 300 + 100 + 120)
    assert Sweeper(settings).sweep(live_instances=set()).removed == 1
    monkeypatch.undo()
    eventually(lambda: not left(settings), within_s=30)


def test_when_its_time_is_over_it_ends_and_says_so(opened: Open, settings: Settings, tmp_path: Path) -> None:
    terminal = opened(a_task(tmp_path / "look"), "--environment", "local", "--timeout", 2)
    terminal.until(b"its 2 s are over")
    assert terminal.process.wait(30) == 124
    assert left(settings) == []


# --- One command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local", pytest.param("docker", marks=pytest.mark.docker)], indirect=True)
def test_one_command_hands_on_its_streams_and_its_exit_code(kind: str, look: Path, settings: Settings) -> None:
    command = "printf '\\377 out'; echo \"err $GREETING\" >&2; exit 5"
    done = ran(settings, look, "--environment", kind, "--command", command)
    assert (done.returncode, done.stdout, done.stderr) == (5, b"\xff out", b"err hello\n")
    assert left(settings) == []


@pytest.mark.docker
def test_the_image_is_built_and_the_limits_and_the_network_are_the_tasks(
    settings: Settings, tmp_path: Path, base_image_tag: str
) -> None:
    recipe = f"FROM {base_image_tag}\nRUN echo {uuid.uuid4()} > /built\n"
    a_task(tmp_path / "set" / "look", recipe=recipe, more="memory_mb = 96\n")
    a_task(tmp_path / "set" / "other", image="nowhere.test/nothing:1")
    memory = "cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null"
    done = ran(settings, f"{tmp_path}/set:look", "--command", f"wc -c < /built; ls /sys/class/net; {memory}")
    assert done.stdout.split() == [b"37", b"lo", str(96 << 20).encode()], done
    assert left(settings) == []


def test_a_command_that_does_not_end_is_ended(settings: Settings, tmp_path: Path) -> None:
    folder = a_task(tmp_path / "look")
    done = ran(settings, folder, "--environment", "local", "--timeout", 1, "--command", "echo begun; sleep 63.5")
    assert (done.returncode, done.stdout) == (124, b"begun\n")
    assert b"did not end within 1 s" in done.stderr
    assert b"sleep 63.5" not in commands_of_this_host()


@pytest.mark.docker
def test_it_has_the_tools_of_the_agent_that_is_named(
    settings: Settings, tmp_path: Path, base_image_tag: str, megaflow: CommandLine, shell: Shell
) -> None:
    (tmp_path / "agent").mkdir()
    told = {"protocol": "megaflow-agent/1", "name": "mine", "version": "1", "argv": ["{tool}/run"]}
    manifest = "".join(f"{name} = {json.dumps(value)}\n" for name, value in (told | {"placement": "inside"}).items())
    (tmp_path / "agent" / "agent.toml").write_text(manifest)
    (tmp_path / "agent" / "run").write_text("only this\n")
    megaflow.use(settings.model_copy(update={"agent_manifests": (tmp_path / "agent" / "agent.toml",)}))
    folder = a_task(tmp_path / "look", image=base_image_tag)
    show = f"cat {TOOLS_INSIDE}/mine/run"
    assert shell(folder, "--command", show, kind="docker").exit_code == 1
    done = shell(folder, "--agent", "mine", "--command", show, kind="docker")
    assert (done.exit_code, done.stdout_bytes) == (0, b"only this\n")
    assert left(settings) == []


# --- Several containers ---------------------------------------------------------------------------------------------


COMPOSE = """
services:
  main: {image: BASE, environment: {WHO: main}}
  shop: {image: BASE, environment: {WHO: shop}, command: [sleep, "600"]}
"""


@pytest.fixture
def pair(tmp_path: Path, base_image_tag: str) -> Path:
    folder = a_task(tmp_path / "pair", recipe="")
    (folder / "environment" / "docker-compose.yaml").write_text(COMPOSE.replace("BASE", base_image_tag))
    return folder


@pytest.mark.docker
def test_a_command_runs_in_any_of_several_containers(pair: Path, settings: Settings, shell: Shell) -> None:
    for service, who in (((), b"main\n"), (("--service", "main"), b"main\n"), (("--service", "shop"), b"shop\n")):
        done = shell(pair, *service, "--command", "echo $WHO; exit 3", kind="docker")
        assert (done.exit_code, done.stdout_bytes) == (3, who)
    assert left(settings) == []


@pytest.mark.docker
def test_a_service_that_is_not_there_is_told_before_anything_is_made(
    pair: Path, settings: Settings, megaflow: CommandLine, shell: Shell
) -> None:
    megaflow.use(settings.model_copy(update={"docker_url": "unix:///nowhere"}))
    with pytest.raises(UnknownName, match="unknown service 'till'; known: main, shop"):
        shell(pair, "--service", "till", "--command", "true", kind="docker")


# --- What is wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "more", "error", "said"),
    [
        ("", (), SpecInvalid, r"found 2 in .*: name one as .*/set:TASK, of one, two"),
        (":three", (), SpecInvalid, r"has no task 'three'; it has one, two"),
        ("/nothing", (), DatasetInvalid, "found nothing at"),
        (":one", ("--service", "shop"), UnknownName, "has one container, and no service 'shop'"),
        (":one", ("--agent", "nobody"), UnknownName, "unknown agent 'nobody'"),
        (":one", ("--agent", "nop,oracle"), SpecInvalid, "expected one task and one agent; found 2"),
    ],
)
def test_wrong_input_is_told_and_makes_nothing(
    task: str, more: tuple[str, ...], error: type[MegaFlowError], said: str, settings: Settings, shell: Shell, sets: str
) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(error, match=said):
        shell(f"{sets}{task}", *more, "--command", "true")
    assert left(settings) == []
    assert signal.getsignal(signal.SIGINT) is before


def test_without_a_terminal_a_command_is_needed(shell: Shell, sets: str) -> None:
    result = shell(f"{sets}:one")
    assert result.exit_code == 2
    assert "expected a terminal" in result.output
