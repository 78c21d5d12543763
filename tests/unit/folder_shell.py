"""A shell onto a temporary folder: real commands, real git, no isolation. The smallest thing that is a `Shell`."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import tarfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from app.models.shell import CommandResult


class FolderProgram:
    """A program with pipes: what it writes to either stream comes as it came."""

    def __init__(self, argv: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )

    def write(self, data: bytes) -> None:
        self._process.stdin.write(data)

    def close_input(self) -> None:
        self._process.stdin.close()

    def read(self, timeout_s: float | None = None) -> bytes | None:
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        return os.read(self._process.stdout.fileno(), 65536) if ready else None

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()


class FolderShell:
    """Absolute paths lead below `root`; commands learn the places of the task's folders by their variables."""

    def __init__(self, root: Path, workdir: str = "/testbed") -> None:
        self.root = root
        self.workdir = workdir
        self.path(workdir).mkdir(parents=True, exist_ok=True)

    def path(self, inside: str) -> Path:
        return self.root / inside.lstrip("/")

    def run(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float,
        stdin: bytes | None = None,
    ) -> CommandResult:
        started = time.monotonic()
        process = subprocess.Popen(
            ["sh", "-c", command],
            cwd=self.path(cwd or self.workdir),
            env={**self._environment(), **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(stdin or b"", timeout=timeout_s)
            timed_out = False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            timed_out = True
        code = None if timed_out else process.returncode
        return CommandResult(code, out, err, timed_out, False, time.monotonic() - started)

    def stream(self, argv: Sequence[str], **_: object) -> FolderProgram:
        return FolderProgram(argv, self.path(self.workdir), self._environment())

    def _environment(self) -> dict[str, str]:
        places = {"TESTS_DIR": "/tests", "LOGS_DIR": "/logs", "SOLUTION_DIR": "/solution"}
        plain = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # ours take two seconds to import
        return {**os.environ, **plain, **{name: str(self.path(inside)) for name, inside in places.items()}}

    def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        target = self.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(mode)

    def get(self, path: str) -> bytes:
        return self.path(path).read_bytes()

    def put_tree(self, archive: bytes, path: str) -> None:
        self.path(path).mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(self.path(path))  # our own archives; Python 3.11.2 has no filters


def git(folder: Path, *arguments: str) -> str:
    """Run git as somebody without any configuration."""
    env = {
        **os.environ,
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
        **{f"GIT_{who}_{what}": "a@b.invalid" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }
    return subprocess.run(["git", *arguments], cwd=folder, env=env, check=True, capture_output=True, text=True).stdout


def committed(folder: Path, files: Mapping[str, str]) -> str:
    """Make `folder` a repository of these files; returns the commit."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "base")
    return git(folder, "rev-parse", "HEAD").strip()


def new_file(path: str, text: str, mode: str = "100644") -> str:
    """The patch that makes it."""
    lines = "".join(f"+{line}\n" for line in text.splitlines())
    hunk = f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{text.count(chr(10))} @@\n{lines}" if text else ""
    return f"diff --git a/{path} b/{path}\nnew file mode {mode}\nindex 0000000..1111111\n{hunk}"
