"""Runs one image build on the engine within its deadline and limits, and stores its output."""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import requests
from urllib3.exceptions import HTTPError

from app.errors import DiskFull, EngineUnavailable, ImageBuildFailed
from app.host.disk import no_space
from app.host.engine import Engine
from app.images.build_limits import BuildLimits, BuildWatch
from app.images.build_logs import BuildLog

_LOG_TAIL = 3000
_STEP_LOST = re.compile(r"(unable to find image|[Nn]o such image:?) \"?sha256:", re.ASCII)
"""Error of a step whose cached image another process removed. The build is repeated once."""


@dataclass
class Builder:
    """An image build with its output in `log`. logins: by registry, for base images. turns: as for `BuildWatch`."""

    engine: Engine
    log: BuildLog
    limits: BuildLimits
    turns: Path
    logins: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)

    def build(self, tag: str, params: dict[str, Any], context: IO[bytes], deadline: float) -> None:
        """Raises: ImageBuildFailed with the log's tail, DiskFull, EngineUnavailable."""
        doing = f"build {tag}"
        try:
            failure = self._follow(doing, params, context, deadline)
            if failure and _STEP_LOST.search(failure) and context.seekable():
                context.seek(0)
                failure = self._follow(doing, params, context, deadline)
        except (requests.RequestException, HTTPError) as error:
            if time.monotonic() < deadline:
                raise EngineUnavailable(f"{doing}: the connection to the engine broke ({error}).") from error
            failure = None
        if time.monotonic() >= deadline:
            failure = "it took longer than this task allows for its image"
        if failure:
            _raise_if_full(failure, doing)
            raise ImageBuildFailed(f"{tag} could not be built: {failure}\n{self._tail()}")

    def _tail(self) -> str:
        file = self.log.file
        tail = file.read_text(errors="replace")[-_LOG_TAIL:]
        return f"The log's end (all of it is in {file} on that host):\n{tail}"

    def _follow(self, doing: str, params: dict[str, Any], context: IO[bytes], deadline: float) -> str | None:
        """Returns what went wrong, or None. Cuts the connection at the deadline. Raises: ImageBuildFailed, DiskFull."""
        with ExitStack() as held:
            params = {**params, **self.limits.parameters}
            response = held.enter_context(self._start(params, context, max(1.0, deadline - time.monotonic())))
            if response.status_code != 200:
                return response.text

            def cut() -> None:
                with suppress(OSError, RuntimeError, ValueError):  # the build has just ended
                    response.raw.shutdown()

            timer = threading.Timer(max(0.0, deadline - time.monotonic()), cut)
            timer.daemon = True
            timer.start()
            held.callback(timer.cancel)
            watch = BuildWatch(self.engine, doing, self.limits, self.turns, cut)
            failure = None
            try:
                with watch:
                    failure = self._read(response, watch)
            except (requests.RequestException, HTTPError):
                if watch.failure is None:
                    raise
        if watch.failure is not None:
            raise type(watch.failure)(f"{watch.failure}\n{self._tail()}")
        return failure

    def _read(self, response: requests.Response, watch: BuildWatch) -> str | None:
        for line in filter(None, response.iter_lines()):  # a line's end in two chunks gives an empty line
            step = json.loads(line)
            text = str(step.get("stream") or step.get("status") or step.get("error") or "")
            self.log.write(text)
            watch.read_line(text)
            if "error" in step:
                return str(step["error"])
        return None

    def _start(self, params: dict[str, Any], context: IO[bytes], timeout_s: float) -> requests.Response:
        # Not the client's own `build`: it hides the response, which is needed to cut a build that hangs.
        api = self.engine.api
        encoded = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in params.items()}
        headers = {"Content-Type": "application/x-tar"}
        if self.logins:
            headers["X-Registry-Config"] = base64.urlsafe_b64encode(json.dumps(self.logins).encode()).decode()
        with self.engine.named("start a build", ImageBuildFailed):
            return api.post(
                f"{api.base_url}/v{api.api_version}/build",
                params=encoded,
                data=context,
                headers=headers,
                stream=True,
                timeout=(30.0, timeout_s),
            )


def _raise_if_full(text: str, doing: str) -> None:
    if no_space(text):
        raise DiskFull(f"{doing}: the engine's disk is full ({text.strip()}); free some with `docker system prune`.")


def recipe_file(folder: Path, name: str) -> Path:
    """Raises: ImageBuildFailed: there is no such file in the context."""
    file = (folder / name).resolve()
    if not file.is_relative_to(folder.resolve()) or not file.is_file():
        names = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise ImageBuildFailed(f"expected {name} in the build context, found {names}.")
    return file
