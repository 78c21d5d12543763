"""The bridge: one environment's shell over a Unix socket, for one framework, while it runs."""

from __future__ import annotations

import base64
import json
import socket
import stat
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from app.agents.bridge import serve
from app.errors import DiskFull, EnvironmentFailed
from app.models.shell import CommandResult

MORE: dict[str, Any] = {"out_of_memory": True, "logs": ("0001.stdout",)}


class EchoShell:
    """Answers with what it was asked, keeps files; `gone` breaks it, `hold` keeps it busy."""

    def __init__(self) -> None:
        self.gone = False
        self.files: dict[str, tuple[bytes, int]] = {}
        self.hold = threading.Event()
        self.hold.set()

    def run(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float,
        stdin: bytes | None = None,
    ) -> CommandResult:
        if self.gone:
            raise EnvironmentFailed("the container is gone")
        self.hold.wait(10)
        said = stdin if stdin is not None else json.dumps([command, cwd, dict(env or {}), timeout_s]).encode()
        return CommandResult(3, said, b"\xff!", timed_out=False, truncated=True, duration_s=0.5, **MORE)

    def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        if path.startswith("/full"):
            raise DiskFull("no space left")
        self.files[path] = (content, mode)

    def get(self, path: str) -> bytes:
        if self.gone:
            raise EnvironmentFailed("the container is gone")
        if path == "/huge":
            return bytes(60 << 20)
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path][0]

    def put_tree(self, archive: bytes, path: str) -> None:
        raise NotImplementedError


def ask(address: Path, **request: Any) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(address))
        content = json.dumps(request).encode()
        connection.sendall(struct.pack(">I", len(content)) + content)
        with connection.makefile("rb") as stream:
            (length,) = struct.unpack(">I", stream.read(4))
            answer: dict[str, Any] = json.loads(stream.read(length))
            return answer


def test_a_command_and_its_result_cross_whole() -> None:
    with serve(EchoShell()) as bridge:
        answer = ask(bridge.address, command="ls ä", cwd="/w", env={"A": "b"}, timeout_s=7)
    assert answer == {
        "exit_code": 3,
        "output": json.dumps(["ls ä", "/w", {"A": "b"}, 7.0]) + "�!",
        "timed_out": False,
        "truncated": True,
        "duration_s": 0.5,
        "out_of_memory": True,
        "logs": ["0001.stdout"],
    }


def test_only_this_user_can_reach_it_and_only_while_the_block_runs() -> None:
    with serve(EchoShell()) as bridge:
        folder = bridge.address.parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()
    with pytest.raises(OSError, match="No such file"):
        ask(bridge.address, command="ls")


def test_an_environment_that_is_gone_is_a_fault_and_kept_for_the_caller() -> None:
    shell = EchoShell()
    shell.gone = True
    with serve(shell) as bridge:
        for request in ({"command": "ls"}, {"get": "/x"}):
            assert "the container is gone" in ask(bridge.address, **request)["fault"]
        assert isinstance(bridge.fault, EnvironmentFailed)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x00",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x01{",
        struct.pack(">I", 200_000) + b"[" * 200_000,
    ],
)
def test_nonsense_on_the_wire_harms_nobody_else(raw: bytes) -> None:
    with serve(EchoShell()) as bridge:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(bridge.address))
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
        assert ask(bridge.address, command="ls")["exit_code"] == 3
        assert bridge.fault is None


def test_hello_tells_the_protocol_and_refuses_another() -> None:
    with serve(EchoShell()) as bridge:
        assert ask(bridge.address, hello="megaflow-bridge/1") == {
            "hello": "megaflow-bridge/1",
            "longest_frame": 64 << 20,
        }
        assert "megaflow-bridge/1" in ask(bridge.address, hello="megaflow-bridge/2")["error"]


def test_files_go_in_and_come_out_as_they_are() -> None:
    shell, content = EchoShell(), bytes(range(256))
    with serve(shell) as bridge:
        assert ask(bridge.address, put="/a b/c", content=base64.b64encode(content).decode(), mode=0o755) == {
            "put": "/a b/c"
        }
        assert shell.files == {"/a b/c": (content, 0o755)}
        assert base64.b64decode(ask(bridge.address, get="/a b/c")["content"]) == content


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ({"cwd": "/"}, "command"),
        ({}, "none"),
        ({"command": 1}, "'command'"),
        ({"command": "a\0b"}, "NUL"),
        ({"command": "ls", "cwd": 1}, "'cwd'"),
        ({"command": "ls", "env": ["A"]}, "'env'"),
        ({"command": "ls", "env": {"A": 1}}, "'env'"),
        ({"command": "ls", "env": {"A=B": "1"}}, "'env'"),
        ({"command": "ls", "timeout_s": "soon"}, "'timeout_s'"),
        ({"command": "ls", "timeout_s": -1}, "'timeout_s'"),
        ({"command": "ls", "timeout_s": float("nan")}, "'timeout_s'"),
        ({"command": "ls", "stdin": "not base64!"}, "'stdin'"),
        ({"put": "/x"}, "'content'"),
        ({"put": "relative", "content": ""}, "'put'"),
        ({"put": "/", "content": ""}, "'put'"),
        ({"put": "/x", "content": "", "mode": "rwx"}, "'mode'"),
        ({"put": "/full/x", "content": ""}, "no space left"),
        ({"get": "/absent"}, "FileNotFoundError"),
        ({"get": "/huge"}, "at most"),
    ],
)
def test_what_cannot_be_done_is_told_and_the_environment_is_still_there(
    request_: dict[str, Any], complaint: str
) -> None:
    with serve(EchoShell()) as bridge:
        assert complaint in ask(bridge.address, **request_)["error"]
        assert bridge.fault is None
        assert ask(bridge.address, command="ls")["exit_code"] == 3


def test_leaving_does_not_wait_for_a_command_without_end() -> None:
    shell = EchoShell()
    shell.hold.clear()
    with socket.socket(socket.AF_UNIX) as connection:
        with serve(shell) as bridge:
            connection.connect(str(bridge.address))
            content = json.dumps({"command": "sleep 1000"}).encode()
            connection.sendall(struct.pack(">I", len(content)) + content)
            time.sleep(0.1)
            left = time.monotonic()
        assert time.monotonic() - left < 4
        shell.hold.set()


def test_what_a_killed_process_left_is_removed_and_what_is_served_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with tempfile.TemporaryDirectory(prefix="mf-", dir="/tmp") as place:  # short, as a socket's path must be
        monkeypatch.setattr(tempfile, "tempdir", place)
        old, living, foreign = (
            Path(place) / name
            for name in (f"megaflow-bridge-{gone.pid}-x", "megaflow-bridge-1-x", f"something-{gone.pid}-else")
        )
        for folder in (old, living, foreign):
            folder.mkdir()
        with serve(EchoShell()) as served, serve(EchoShell()) as another:
            assert another.address.exists()
            assert ask(served.address, command="ls")["exit_code"] == 3
            assert not old.exists()
            assert living.exists()
            assert foreign.exists()
        assert not served.address.parent.exists()
