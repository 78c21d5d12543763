"""SWE-ReX: its docker deployment, on an image that has its server installed.

`session` is what agents use (a shell in pexpect); without it each command is a process (`execute`). Every environment
gets an event loop of its own, as when SWE-agent runs many tasks in threads: its start blocks the loop that it is on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from live import Live, Loop, Simple
from swerex.deployment.docker import DockerDeployment
from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest, ReadFileRequest, UploadRequest


class Rex:
    def __init__(self, options: dict[str, Any]) -> None:
        self._image, self._session = options["image"], options["session"]

    def start(self) -> Live:
        loop = Loop()
        deployment = DockerDeployment(image=self._image, pull="never", startup_timeout=60.0)
        try:
            loop.call(deployment.start())
            if self._session:
                loop.call(deployment.runtime.create_session(CreateBashSessionRequest(startup_timeout=10.0)))
        except BaseException:
            loop.call(deployment.stop())
            loop.close()
            raise
        return RexLive(loop, deployment, self._session)

    def versions(self) -> dict[str, str]:
        return {"swe-rex": version("swe-rex")}

    def extra(self) -> dict[str, Callable[..., Any]]:
        return {}

    def close(self) -> None:
        pass


class RexLive(Simple):
    ends_quickly = True  # it kills

    def __init__(self, loop: Loop, deployment: DockerDeployment, session: bool) -> None:
        self._loop, self._deployment, self._session = loop, deployment, session
        self.container = deployment.container_name or ""

    def run(self, command: str) -> tuple[int, bytes]:
        runtime = self._deployment.runtime
        if self._session:
            seen = self._loop.call(runtime.run_in_session(BashAction(command=command, check="silent", timeout=120)))
            return seen.exit_code or 0, seen.output.encode()
        done = self._loop.call(runtime.execute(Command(command=["bash", "-c", command], timeout=120)))
        return done.exit_code or 0, (done.stdout + done.stderr).encode()

    def put(self, path: str, content: bytes) -> None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            upload = UploadRequest(source_path=file.name, target_path=path)
            self._loop.call(self._deployment.runtime.upload(upload))

    def get(self, path: str) -> bytes:
        """Its files are text: latin-1 carries every byte."""
        read = self._deployment.runtime.read_file(ReadFileRequest(path=path, encoding="latin-1"))
        content: bytes = self._loop.call(read).content.encode("latin-1")
        return content

    def stop(self) -> None:
        self._loop.call(self._deployment.stop())
        self._loop.close()


contender = Rex
