"""What an agent leaves on purpose: names, depths, kinds of files and words that would break whoever collects them."""

from __future__ import annotations

import errno
import io
import os
import signal
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from pydantic import SecretStr

from app.agents import FRAMEWORKS, FrameworkOptions, framework_named
from app.agents.base import ModelEndpoint
from app.agents.external import framework as result
from app.agents.framework import AgentEnding, Ended, Placement
from app.agents.installation import Installer
from app.agents.running import collecting
from app.agents.running.agent import end_text
from app.agents.running.collecting import DEEPEST, LEFT_OUT, collect_inside, tidy
from app.agents.running.redact import blot
from app.agents.swe_agent.adapter import SweAgent
from app.errors import EnvironmentFailed
from app.models.endings import BLAME, Blame, EndReason
from app.models.model_calls import Dialect
from app.models.shell import CommandResult
from tests.unit.folder_shell import FolderShell
from tests.unit.frameworks import KEY, a_job, a_place, ended

LONG = "/".join(["b" * 250] * 17) + "/f"
NOBODY = 65534


def archive(*names: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))
    return buffer.getvalue()


@dataclass
class Inside:
    """A shell onto a home that is one archive."""

    tree: bytes | Exception = b""
    files: dict[str, bytes] = field(default_factory=dict)
    gone: bool = False

    def run(self, command: str, **_: object) -> CommandResult:
        if self.gone and command == "true":
            raise EnvironmentFailed("destroyed")
        return CommandResult(0, b"", b"", timed_out=False, truncated=False, duration_s=0.0)

    def get_tree(self, path: str) -> bytes:
        if isinstance(self.tree, Exception):
            raise self.tree
        return self.tree

    def get(self, path: str) -> bytes:
        try:
            return self.files[path]
        except KeyError:
            raise FileNotFoundError(path) from None


def collected(shell: Any, into: Path, first: Sequence[str] = ()) -> str:
    """The note of what was left out."""
    collect_inside(shell, "/home", into, first=first)
    note = into / LEFT_OUT
    return note.read_text() if note.exists() else ""


# --- Inside ---------------------------------------------------------------------------------------------------------


def test_names_that_no_file_here_can_have_stay_behind(tmp_path: Path) -> None:
    names = (LONG, "n" * 300, "f/ine", "f/ine/below", "\udcff", "/".join("d" * DEEPEST), "a/" * 1500 + "f")
    note = collected(Inside(archive(*names)), tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {
        "f/ine",
        "\udcff",
        "/".join("d" * DEEPEST),
        LEFT_OUT,
    }
    for words in ("bbb", "nnn", "a/a/", "too deep", "f/ine/below"):
        assert words in note


def test_a_gone_environment_and_a_full_disk_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentFailed, match="destroyed"):
        collected(Inside(RecursionError(), gone=True), tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(collecting, "_write", full)
    with pytest.raises(OSError, match="full"):
        collected(Inside(archive("one")), tmp_path)


# --- Results by name ------------------------------------------------------------------------------------------------


class Bare(FolderShell):
    """An image with a shell, and no other program."""

    def run(self, command: str, **options: Any) -> CommandResult:
        programs = self.path("/bin")
        if not programs.exists():
            programs.mkdir()
            (programs / "sh").symlink_to("/bin/sh")
        return super().run(
            command.replace("/home", str(self.path("/home"))), **options | {"env": {"PATH": str(programs)}}
        )


def test_a_result_comes_from_an_image_without_any_programs(tmp_path: Path) -> None:
    shell = Bare(tmp_path / "root")
    shell.put("/home/output/task.traj", b"{}")
    shell.put("/elsewhere", b"secret")
    shell.path("/home/link").symlink_to(shell.path("/elsewhere"))
    os.mkfifo(shell.path("/home/pipe"))
    note = collected(shell, tmp_path / "into", ("output/task.traj", "missing", "link", "pipe", "output"))
    assert "du, find and cut" in note
    found = {str(path.relative_to(tmp_path / "into")) for path in (tmp_path / "into").rglob("*") if path.is_file()}
    assert found == {"output/task.traj", LEFT_OUT}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_models_key_is_in_a_frameworks_variables_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.agents.swe_agent.adapter.settings", lambda *_: b"")
    monkeypatch.setattr(SweAgent, "install", lambda _: SimpleNamespace(folder=tmp_path))
    command = framework_named(name, FrameworkOptions(Installer(tmp_path))).command(a_job(), a_place())
    assert KEY in command.env.values()
    assert not any(KEY in word for word in command.argv)
    assert not any(KEY.encode() in content for content in command.files.values())


# --- Outside --------------------------------------------------------------------------------------------------------


@pytest.fixture
def home() -> Iterator[Path]:
    """Where a user without rights may work."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "home")
        made.mkdir()
        if os.getuid() != 0:
            yield made
            return
        for path in (Path(folder), made):
            os.chown(path, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            yield made
        finally:
            os.seteuid(0)


def test_folders_that_forbid_are_opened(home: Path) -> None:
    for mode in (0o555, 0o000):
        folder = home / f"{mode:o}"
        folder.mkdir()
        (folder / "large").write_bytes(b"x" * 3000)
        (folder / "link").symlink_to("/etc")
        folder.chmod(mode)
    home.chmod(0o500)
    tidy(home, most_bytes=1000)
    assert [path.name for path in home.rglob("*") if not path.is_dir()] == [LEFT_OUT]
    assert sorted((home / LEFT_OUT).read_text().split()) == ["./0/large", "./555/large"]


def test_a_tree_deeper_than_anybody_can_walk_goes(home: Path) -> None:
    here = os.open(home, os.O_DIRECTORY)
    for number in range(1200):
        os.mkdir("d" * 20, dir_fd=here)
        below = os.open("d" * 20, os.O_DIRECTORY, dir_fd=here)
        if number % 400 == 0:
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        os.close(here)
        here = below
    os.close(here)
    tidy(home)
    assert (home / LEFT_OUT).read_text().strip() == "/".join([".", *["d" * 20] * DEEPEST])
    folders = [path for path in home.rglob("*") if path.is_dir()]
    assert len(folders) == DEEPEST - 1
    assert (home / "file").exists()


def test_of_too_many_files_and_too_long_paths_the_rest_is_removed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "MOST_FILES", 30)
    here = os.open(home, os.O_DIRECTORY)
    for _ in range(20):  # 5,000 bytes: no program that takes whole paths could open its file
        os.mkdir("d" * 250, dir_fd=here)
        below = os.open("d" * 250, os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    for number in range(100):
        (home / f"empty{number}").touch()
    tidy(home)
    assert len([path for path in home.rglob("*") if path.is_file()]) <= 31
    assert max(len(str(path)) for path in home.rglob("*")) <= 3500
    assert "too many" in (home / LEFT_OUT).read_text()


def test_a_file_from_which_the_key_cannot_be_taken_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-0123456789-secret"
    (tmp_path / "file").write_text(key)

    def refused(*_: object) -> None:
        raise PermissionError(13, "not yours")

    monkeypatch.setattr(Path, "chmod", refused)
    model = ModelEndpoint("http://engine.test/v1", "m", SecretStr(key))
    blot(SimpleNamespace(model=model), [tmp_path])  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


# --- Its words ------------------------------------------------------------------------------------------------------


@dataclass
class Says:
    """A framework with one ending."""

    answer: Any
    placement: Placement = Placement.INSIDE
    needs_model: bool = True

    name: ClassVar[str] = "says"
    version: ClassVar[str] = "1"
    dialect: ClassVar[Dialect] = Dialect.CHAT

    def ending(self, ended: Ended) -> AgentEnding:
        if isinstance(self.answer, Exception):
            raise self.answer
        found: AgentEnding = self.answer
        return found


def tell(answer: Any, at: Ended, placement: Placement = Placement.INSIDE, **more: bool) -> AgentEnding:
    return end_text(Says(answer, placement), at, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", ["x", -1, True, 1.5, 1 << 40])
def test_steps_that_are_none_are_not_kept_and_the_ending_is(tmp_path: Path, steps: Any) -> None:
    ending = tell(AgentEnding(EndReason.SUBMITTED, "x\0\ud800" + "y" * 9999, steps), ended(tmp_path, 0))
    assert (ending.reason, ending.steps) == (EndReason.SUBMITTED, None)
    assert ending.detail.startswith("x?yyy")
    assert len(ending.detail) <= 2000


@pytest.mark.parametrize("error", [RecursionError(), ValueError("odd"), KeyError("x")])
def test_what_its_adapter_does_not_understand_is_its_error(tmp_path: Path, error: Exception) -> None:
    assert tell(error, ended(tmp_path, 0)).reason is EndReason.AGENT_ERROR


# --- Its signals ----------------------------------------------------------------------------------------------------

FINE = AgentEnding(EndReason.SUBMITTED)
OURS = AgentEnding(EndReason.INFRASTRUCTURE, "killed")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_kill_is_the_agents_own_inside_and_ours_outside(tmp_path: Path, number: signal.Signals) -> None:
    at = ended(tmp_path, -number, said="last words")
    assert tell(FINE, at).reason is EndReason.AGENT_ERROR
    assert f"signal {int(number)}: last words" in tell(FINE, at).detail
    assert tell(FINE, at, Placement.OUTSIDE).reason is EndReason.INFRASTRUCTURE
    assert tell(FINE, at, out_of_memory=True).reason is EndReason.RESOURCE_LIMIT


def test_no_adapter_inside_can_have_an_attempt_done_again_for_a_crash(tmp_path: Path) -> None:
    at = ended(tmp_path, -signal.SIGSEGV)
    assert tell(OURS, at).reason is EndReason.AGENT_ERROR
    assert tell(OURS, at, Placement.OUTSIDE).reason is EndReason.INFRASTRUCTURE
    making = FrameworkOptions(Installer(tmp_path, may_install=False))
    for name in FRAMEWORKS:
        framework = framework_named(name, making)
        if framework.placement is Placement.INSIDE:
            assert EndReason.INFRASTRUCTURE not in framework.endings.values(), name


OPTIONS = FrameworkOptions(Installer(Path("/"), may_install=False))
TABLES = [
    *(pytest.param(framework_named(name, OPTIONS).endings, id=name) for name in FRAMEWORKS),
    pytest.param(result.ENDINGS, id="external agents"),
]


@pytest.mark.parametrize("endings", TABLES)
def test_no_framework_says_what_only_we_can_know(endings: Mapping[str, EndReason]) -> None:
    """A cancel, a lost worker, a grader's result: ends that no adapter decides."""
    ours = {reason for reason, blame in BLAME.items() if blame in (Blame.PERSON, Blame.INTERRUPTION)}
    ours |= {EndReason.LOST, EndReason.DEADLINE, EndReason.GRADING_ERROR}
    assert ours.isdisjoint(endings.values())
