"""The engine itself, by the cheapest calls that it has: the limit of everything that goes through it."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from engine import Engine, joined
from live import Live, Simple


class RawEngine:
    """The same limits as ours has, no network, `sleep` as the first process."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._engine = Engine()
        self._body = {
            "Image": options["image"],
            "Entrypoint": ["sleep", "infinity"],
            "Cmd": [],
            "Labels": {"megaflow.bench": "raw"},
            "HostConfig": {
                "NetworkMode": "none",
                "Memory": options["memory_bytes"],
                "MemorySwap": options["memory_bytes"],
                "NanoCpus": int(options["cpus"] * 1e9),
                "PidsLimit": options["pids"],
                "IpcMode": "private",
                "SecurityOpt": ["no-new-privileges"],
                "LogConfig": {"Type": "none"},
            },
        }

    def start(self) -> Live:
        container = self._engine.ask("POST", "/containers/create", self._body)["Id"]
        self._engine.ask("POST", f"/containers/{container}/start")
        return RawLive(self._engine, container)

    def versions(self) -> dict[str, str]:
        told = self._engine.ask("GET", "/version")
        parts = {part["Name"]: part["Version"] for part in told.get("Components", [])}
        return {"engine": told["Version"], "api": told["ApiVersion"], "kernel": told["KernelVersion"], **parts}

    def extra(self) -> dict[str, Callable[..., Any]]:
        return {"removals": self.removals, "replacements": self.replacements}

    def close(self) -> None:
        pass

    def removals(self, count: int) -> dict[str, Any]:
        """Kill and remove, nothing else: what a teardown is held against."""
        took: list[float] = []
        for _ in range(count):
            live = self.start()
            begun = time.perf_counter()
            self._engine.ask("POST", f"/containers/{live.container}/kill")
            self._engine.remove(live.container)
            took.append(time.perf_counter() - begun)
        return {"took_s": took}

    def replacements(self, count: int) -> dict[str, Any]:
        """Kill and remove one, create and start another: what a reset is held against."""
        took: list[float] = []
        live = self.start()
        for _ in range(count):
            begun = time.perf_counter()
            self._engine.ask("POST", f"/containers/{live.container}/kill")
            self._engine.remove(live.container)
            live = self.start()
            took.append(time.perf_counter() - begun)
        self._engine.remove(live.container)
        return {"took_s": took}


class RawLive(Simple):
    ends_quickly = True

    def __init__(self, engine: Engine, container: str) -> None:
        self._engine = engine
        self.container = container

    def run(self, command: str) -> tuple[int, bytes]:
        wanted = {"Cmd": ["bash", "-c", command], "AttachStdout": True, "AttachStderr": True}
        made = self._engine.ask("POST", f"/containers/{self.container}/exec", wanted)["Id"]
        output = joined(self._engine.stream(f"/exec/{made}/start", {"Detach": False, "Tty": False}))
        return self._engine.ask("GET", f"/exec/{made}/json")["ExitCode"], output

    def put(self, path: str, content: bytes) -> None:
        place, buffer = PurePosixPath(path), io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            member = tarfile.TarInfo(place.name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        self._engine.raw("PUT", self._archive(str(place.parent)), buffer.getvalue())

    def get(self, path: str) -> bytes:
        _, archive = self._engine.raw("GET", self._archive(path))
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            member = tar.next()
            content = tar.extractfile(member) if member is not None else None
            return content.read() if content is not None else b""

    def stop(self) -> None:
        self._engine.remove(self.container)

    def _archive(self, path: str) -> str:
        return f"/containers/{self.container}/archive?path={quote(path)}"


contender = RawEngine
