"""The `process` provider: instances are process trees on this host."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any, ClassVar
from uuid import UUID

from app.errors import InstanceFailed, LaunchUnclear
from app.instances import launcher
from app.models.instance import InstanceRequest
from app.settings import Settings

_TIMEOUT_S = 30.0


class ProcessProvider:
    """Calls the worker launcher over its Unix socket; holds no connection. The handle is the worker's pid."""

    name: ClassVar[str] = "process"
    _host: ClassVar[str] = "the worker launcher"

    def __init__(self, settings: Settings) -> None:
        self._path = launcher.socket_path(settings)

    def launch(self, requests: Sequence[InstanceRequest]) -> dict[UUID, str]:
        message = {"verb": "launch", "requests": [request.model_dump(mode="json") for request in requests]}
        return {UUID(instance_id): handle for instance_id, handle in self._ask(message, unclear=LaunchUnclear).items()}

    def terminate(self, instance_id: UUID, handle: str, *, grace_s: float) -> None:
        self._ask({"verb": "terminate", "instance_id": str(instance_id), "grace_s": grace_s})

    def alive(self) -> dict[UUID, str]:
        return {UUID(instance_id): handle for instance_id, handle in self._ask({"verb": "alive"}).items()}

    def _ask(self, message: dict[str, Any], *, unclear: type[InstanceFailed] = InstanceFailed) -> dict[str, Any]:
        """Raises: InstanceFailed: no connection; `unclear`: connected, and no answer."""
        kind = InstanceFailed
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(_TIMEOUT_S)
                connection.connect(str(self._path))
                kind = unclear
                connection.sendall(json.dumps(message).encode() + b"\n")
                with connection.makefile("rb") as lines:
                    reply: dict[str, Any] = json.loads(lines.readline())
        except (OSError, ValueError) as error:
            raise kind(f"expected {self._host} at {self._path}, found: {error}; try `megaflow up`") from error
        return reply
