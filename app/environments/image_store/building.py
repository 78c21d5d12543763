"""One build of an image on the engine: followed, cut at its deadline, its output kept."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import requests
from urllib3.exceptions import HTTPError

from app.environments.disk import no_space
from app.environments.engine import Engine
from app.errors import DiskFull, EngineUnavailable, ImageBuildFailed

_LOG_TAIL = 3000
_STEP_LOST = re.compile(r"(unable to find image|[Nn]o such image:?) \"?sha256:", re.ASCII)
"""Somebody removed the image of a step that was taken from the cache: the step is done again the next time."""


@dataclass
class Builder:
    """One build on the engine, its output kept in `log_file`."""

    engine: Engine
    log_file: Path

    def build(self, tag: str, params: dict[str, Any], context: IO[bytes], deadline: float) -> None:
        """Raises: ImageBuildFailed with the log's tail, DiskFull, EngineUnavailable."""
        with self.log_file.open("w") as written:
            try:
                failure = self._follow(params, context, written, deadline)
                if failure and _STEP_LOST.search(failure) and context.seekable():
                    context.seek(0)
                    failure = self._follow(params, context, written, deadline)
            except (requests.RequestException, HTTPError) as error:
                if time.monotonic() < deadline:
                    raise EngineUnavailable(f"build {tag}: the connection to the engine broke ({error}).") from error
                failure = None
        if time.monotonic() >= deadline:
            failure = "it took longer than this task allows for its image"
        if failure:
            _raise_if_full(failure, f"build {tag}")
            tail = self.log_file.read_text(errors="replace")[-_LOG_TAIL:]
            raise ImageBuildFailed(f"{tag} could not be built: {failure}\nThe log's end ({self.log_file}):\n{tail}")

    def _follow(self, params: dict[str, Any], context: IO[bytes], written: IO[str], deadline: float) -> str | None:
        """What went wrong, or None. At the deadline the connection is cut, whereupon the engine stops the step."""
        response = self._start(params, context, max(1.0, deadline - time.monotonic()))
        with response:
            if response.status_code != 200:
                return response.text
            timer = threading.Timer(max(0.0, deadline - time.monotonic()), response.raw.shutdown)
            timer.daemon = True
            timer.start()
            try:
                for line in response.iter_lines():
                    step = json.loads(line)
                    written.write(str(step.get("stream") or step.get("status") or step.get("error") or ""))
                    if "error" in step:
                        return str(step["error"])
            finally:
                timer.cancel()
        return None

    def _start(self, params: dict[str, Any], context: IO[bytes], timeout_s: float) -> requests.Response:
        # Not the client's own `build`: it hides the response, without which nothing can cut a build that hangs.
        api = self.engine.api
        encoded = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in params.items()}
        with self.engine.named("start a build", ImageBuildFailed):
            return api.post(
                f"{api.base_url}/v{api.api_version}/build",
                params=encoded,
                data=context,
                headers={"Content-Type": "application/x-tar"},
                stream=True,
                timeout=(30.0, timeout_s),
            )


def _raise_if_full(text: str, doing: str) -> None:
    if no_space(text):
        raise DiskFull(f"{doing}: the engine's disk is full ({text.strip()}); free some with `docker system prune`.")
