"""Pods as containers of the Docker engine: one container for each pod, labelled, so that none can stay behind."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import struct
import tarfile
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import docker
from docker.errors import APIError, DockerException, NotFound

from tests.kubernetes.store import Object, Store

LABEL = "megaflow.tests.cluster"
_POD = "megaflow.tests.pod"
_OWNER = "megaflow.tests.process"


def _cpus(text: str) -> float:
    """`500m` or `2` as a number."""
    return float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)


class Engine:
    """Blocking calls, for threads. `died` is told of every end: the pod's uid and the container's state."""

    def __init__(self, cluster: str, died: Callable[[str, Object], None]) -> None:
        self._client = docker.from_env(timeout=60)
        self._client.api.trust_env = False  # it reads variables while another thread may set one
        self._cpus = int(self._client.info()["NCPU"])  # the engine refuses more; a node does not
        self._cluster, self._died = cluster, died
        for one in self._client.containers.list(all=True, filters={"label": _OWNER}, ignore_removed=True):
            if not os.path.exists(f"/proc/{one.labels[_OWNER]}"):  # what a killed session left
                _removed(one)
        self._events = self._client.events(decode=True, filters={"event": "die", "label": f"{LABEL}={cluster}"})
        self._listener = threading.Thread(target=self._listen, name="fake-cluster-events", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        with suppress(DockerException, OSError, ValueError):
            for event in self._events:
                uid = event["Actor"]["Attributes"][_POD]
                with suppress(NotFound):
                    self._died(uid, self._client.api.inspect_container(_name(uid))["State"])

    def create(self, pod: Object, store: Store) -> None:
        """The container, not yet started. Raises: ImageNotFound, APIError; Refused when a Secret is not there yet."""
        spec, uid = pod["spec"], pod["metadata"]["uid"]
        one = spec["containers"][0]
        security = (spec.get("securityContext") or {}) | (one.get("securityContext") or {})
        limits = (one.get("resources") or {}).get("limits") or {}
        files, binds = _volumes(pod, store)
        container = self._client.containers.create(
            one["image"],
            entrypoint=one.get("command"),
            command=one.get("args"),
            environment={each["name"]: each.get("value") or "" for each in one.get("env") or ()},
            working_dir=one.get("workingDir"),
            name=_name(uid),
            hostname=pod["metadata"]["name"][:63] if not spec.get("hostNetwork") else None,
            labels={LABEL: self._cluster, _POD: uid, _OWNER: str(os.getpid())},
            network_mode="host" if spec.get("hostNetwork") else "bridge",
            mem_limit=int(limits["memory"]) if "memory" in limits else None,
            nano_cpus=int(min(_cpus(limits["cpu"]), self._cpus) * 1e9) if "cpu" in limits else None,
            user=str(security["runAsUser"]) if "runAsUser" in security else None,
            cap_drop=(security.get("capabilities") or {}).get("drop"),
            security_opt=["no-new-privileges"] if security.get("allowPrivilegeEscalation") is False else None,
            volumes=binds,
        )
        if files:
            container.put_archive("/", files)

    def start(self, uid: str) -> Object:
        """Its attributes when it runs. Raises: APIError."""
        self._client.api.start(_name(uid))
        return self._client.api.inspect_container(_name(uid))

    def kill(self, uid: str, signal: str) -> None:
        """No error when it has ended, or was never there."""
        with suppress(APIError):
            self._client.api.kill(_name(uid), signal)

    def remove(self, uid: str) -> None:
        """No error when it is gone, or going."""
        with suppress(APIError):
            self._client.api.remove_container(_name(uid), v=True, force=True)

    def close(self) -> None:
        """Remove every container of this cluster."""
        self._events.close()
        self._listener.join()
        for one in self._client.containers.list(all=True, filters={"label": f"{LABEL}={self._cluster}"}):
            _removed(one)
        self._client.close()

    async def open_exec(
        self, uid: str, command: list[str], streams: dict[str, bool]
    ) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
        """Start a command; its id and the raw stream of the engine. Over our own connection: the SDK may lose bytes."""
        made = await asyncio.to_thread(
            lambda: self._client.api.exec_create(_name(uid), command, **streams)  # raises: APIError
        )
        path = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
        reader, writer = await asyncio.open_unix_connection(path, limit=1 << 20)
        head = f"POST /exec/{made['Id']}/start HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        if b" 101 " not in answer and b" 200 " not in answer:
            raise APIError(answer.decode(errors="replace"))
        return made["Id"], reader, writer

    def exec_code(self, exec_id: str) -> int:
        """The exit code of a command that has ended."""
        return int(self._client.api.exec_inspect(exec_id)["ExitCode"] or 0)


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, bytes]]:
    """Stream number (1: stdout, 2: stderr) and bytes, until the command ends."""
    with suppress(asyncio.IncompleteReadError):
        while True:
            number, length = struct.unpack(">BxxxL", await reader.readexactly(8))
            yield number, await reader.readexactly(length)


def _removed(container: Any) -> None:
    with suppress(APIError):
        container.remove(v=True, force=True)


def _name(uid: str) -> str:
    return f"fake-pod-{uid}"


def _volumes(pod: Object, store: Store) -> tuple[bytes, list[str]]:
    """Secrets as a tar, and paths of the host as binds."""
    packed, binds, count = io.BytesIO(), [], 0
    volumes = {one["name"]: one for one in pod["spec"].get("volumes") or ()}
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for mount in pod["spec"]["containers"][0].get("volumeMounts") or ():
            volume, path = volumes[mount["name"]], mount["mountPath"]
            if "hostPath" in volume:
                binds.append(f"{volume['hostPath']['path']}:{path}:{'ro' if mount.get('readOnly') else 'rw'}")
                continue
            secret = store.get("secrets", pod["metadata"]["namespace"], volume["secret"]["secretName"])
            for key, value in secret["data"].items():
                member, content = tarfile.TarInfo(f"{path.strip('/')}/{key}"), base64.b64decode(value)
                member.size, member.mode, count = len(content), volume["secret"]["defaultMode"], count + 1
                archive.addfile(member, io.BytesIO(content))
    return packed.getvalue() if count else b"", binds
