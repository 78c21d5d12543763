"""The HTTP side: verbs, watches, exec, faults; and the thread that serves it."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import yaml
from aiohttp import WSMsgType, web
from docker.errors import APIError

from tests.kubernetes.controllers import Controllers
from tests.kubernetes.engine import frames
from tests.kubernetes.store import KINDS, Change, Object, Refused, Selects, merge, selector

_PROTOCOL = "v5.channel.k8s.io"
_PATH = re.compile(
    r"/(api|apis/[^/]+)/[^/]+(/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)(/(?P<name>[^/]+))?(?P<exec>/exec)?"
)
_STDIN, _ERROR, _CLOSE = 0, 3, 255


@dataclass
class Fault:
    """What the next `times` requests meet. `code` 0: the connection is cut; `after`: when the request was done."""

    method: str
    plural: str
    code: int = 0
    reason: str = ""
    message: str = ""
    times: int = 1
    after: bool = False


def kubeconfig(file: Path, server: str, token: str) -> Path:
    """Have a file that leads clients there."""
    named = {
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    }
    file.write_text(yaml.safe_dump({"current-context": "x", **named}))
    return file


class FakeCluster:
    """Serves in a thread for the length of a `with` block; all containers are removed at its end."""

    def __init__(self, *, nodes: Sequence[str] = ("node-1",)) -> None:
        self.token, self.port, self.bookmark_s = uuid.uuid4().hex, 0, 1.0
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self._nodes = list(nodes)
        self._loop = asyncio.new_event_loop()
        self._watches: set[Any] = set()  # their connections

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-cluster", daemon=True)
        self._thread.start()
        try:
            self._do(self._begin)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(AttributeError):
            self._do(self._stop)
            self._do(self._controllers.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def kubeconfig(self, folder: Path) -> Path:
        """A file for clients."""
        return kubeconfig(folder / "kubeconfig", f"http://127.0.0.1:{self.port}", self.token)

    def objects(self, plural: str) -> list[Object]:
        """All of a kind."""
        return self._do(lambda: self._controllers.store.list(plural))

    def evict(self, pod: str) -> None:
        """As a node under pressure."""
        self._do(lambda: self._controllers.fail(self._pod(pod), "Evicted", "The node was low on resource: memory."))

    def take_node(self, node: str) -> None:
        """Its pods fail and are collected."""

        def take() -> None:
            self._controllers.nodes.remove(node)
            for pod in self._controllers.store.list("pods", lambda o: o["spec"].get("nodeName") == node):
                self._controllers.fail(pod, "NodeLost", f"node {node} is gone", condition="DeletionByPodGC")
                self._controllers.delete(pod, 0, None)

        self._do(take)

    def cut_watches(self) -> None:
        """Every connection of a watch ends without a word."""
        self._do(self._cut)

    def forget(self) -> None:
        """Every resource version so far is too old from now on."""
        self._do(lambda: self._controllers.store.forget())

    def stop(self) -> None:
        """Nothing listens; what it knows and its pods stay."""
        self._do(self._stop)

    def start(self) -> None:
        """Listen again, on the same port."""
        self._do(self._listen)

    def _do(self, work: Callable[[], Any]) -> Any:
        async def run() -> Any:
            found = work()
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)

    async def _begin(self) -> None:
        self._controllers = Controllers(self.token[:12], self._nodes)
        await self._listen()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=4 << 20)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        self._cut()
        await self._runner.cleanup()

    def _cut(self) -> None:
        for connection in self._watches:
            connection.abort()

    def _pod(self, name: str) -> Object:
        (found,) = self._controllers.store.list("pods", lambda o: o["metadata"]["name"] == name)
        return found

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        found = _PATH.fullmatch(request.path)
        plural = found["plural"] if found else ""
        self.requests.append(f"{'WATCH' if 'watch' in request.query else request.method} {plural}")
        met = next((f for f in self.faults if f.times and (f.method, f.plural) == (request.method, plural)), None)
        try:
            if request.headers.get("Authorization") != f"Bearer {self.token}":
                raise Refused(401, "Unauthorized", "Unauthorized")
            if found is None or plural not in KINDS:
                raise Refused(404, "NotFound", "the server could not find the requested resource")
            if met is not None:
                met.times -= 1
                if not met.after and met.code:
                    raise Refused(met.code, met.reason, met.message)
            if met is not None and not met.after:
                answer: web.StreamResponse = _json({})
            elif found["exec"]:
                answer = await self._exec(
                    request, self._controllers.store.get(plural, found["namespace"], found["name"])
                )
            else:
                answer = await self._verb(request, plural, found["namespace"], found["name"])
        except Refused as refused:
            return _json(refused.status(), refused.code)
        except (KeyError, TypeError, ValueError) as error:
            return _json(Refused(400, "BadRequest", f"{type(error).__name__}: {error}").status(), 400)
        if met is not None and request.transport is not None:
            request.transport.abort()
        return answer

    async def _verb(self, request: web.Request, plural: str, namespace: str | None, name: str) -> web.StreamResponse:
        store, query = self._controllers.store, request.query
        body: Object = json.loads(await request.read() or b"{}")
        if request.method == "POST":
            for key, text in body.pop("stringData", {}).items():
                body.setdefault("data", {})[key] = base64.b64encode(text.encode()).decode()
            create = self._controllers.create_pod if plural == "pods" else partial(store.create, plural)
            return _json(create(str(namespace), body), 201)
        if not name:
            labels = selector(query.get("labelSelector", ""))
            selects = lambda found: labels(found) and namespace in (None, found["metadata"]["namespace"])  # noqa: E731
            if query.get("watch") in ("1", "true"):
                return await self._watch(request, plural, selects)
            version, kind = KINDS[plural]
            about = {"kind": f"{kind}List", "apiVersion": version, "metadata": {"resourceVersion": str(store.version)}}
            return _json({**about, "items": store.list(plural, selects)})
        present = store.get(plural, str(namespace), name)
        match request.method:
            case "PUT":
                present = store.update(present, body)
            case "PATCH":
                present = store.update(present, merge(present, body))
            case "DELETE":
                grace = body.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
                policy = body.get("propagationPolicy", query.get("propagationPolicy"))
                self._controllers.delete(present, None if grace is None else int(grace), policy)
        return _json(present)

    async def _watch(self, request: web.Request, plural: str, selects: Selects) -> web.StreamResponse:
        store, changes = self._controllers.store, asyncio.Queue[Change]()
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)

        async def send(kind: str, found: Object) -> None:
            await response.write(json.dumps({"type": kind, "object": found}).encode() + b"\n")

        until = self._loop.time() + float(request.query.get("timeoutSeconds", 3600))
        version, kind = KINDS[plural]
        self._controllers.watchers.append(changes.put_nowait)
        connection = request.transport
        self._watches.add(connection)
        try:
            if (start := int(request.query.get("resourceVersion") or 0)) == 0:
                for one in store.list(plural, selects):
                    await send("ADDED", one)
            else:
                for change in store.since(start):
                    changes.put_nowait(change)
            while (left_s := until - self._loop.time()) > 0:
                try:
                    change = await asyncio.wait_for(changes.get(), min(left_s, self.bookmark_s))
                    if change.plural == plural and selects(change.found):
                        await send(change.kind, change.found)
                except TimeoutError:
                    if request.query.get("allowWatchBookmarks") in ("1", "true"):
                        about = {"kind": kind, "apiVersion": version}
                        metadata = {"resourceVersion": str(store.version), "creationTimestamp": None}
                        await send("BOOKMARK", {**about, "metadata": metadata, "spec": {"containers": None}})
        except Refused as refused:
            await send("ERROR", refused.status())
        except ConnectionError:
            pass
        finally:
            self._controllers.watchers.remove(changes.put_nowait)
            self._watches.discard(connection)
        return response

    async def _exec(self, request: web.Request, pod: Object) -> web.StreamResponse:
        """Channels of Kubernetes' subprotocols: the first byte of each message is its number."""
        if pod["status"]["phase"] != "Running":
            raise Refused(400, "BadRequest", f"cannot exec in a pod that is {pod['status']['phase']}")
        streams = {name: request.query.get(name) in ("1", "true") for name in ("stdin", "stdout", "stderr")}
        socket = web.WebSocketResponse(protocols=(_PROTOCOL,), max_msg_size=16 << 20)
        engine = self._controllers.engine
        await socket.prepare(request)
        try:
            opened = await engine.open_exec(pod["metadata"]["uid"], request.query.getall("command"), streams)
        except APIError as error:
            await socket.send_bytes(_last(Refused(500, "InternalError", str(error)).status()))
            return socket
        exec_id, reader, writer = opened
        feeding = asyncio.ensure_future(_feed(socket, writer))
        try:
            with suppress(ConnectionError):
                async for number, part in frames(reader):
                    await socket.send_bytes(bytes([number]) + part)
                code = await asyncio.to_thread(engine.exec_code, exec_id)
                await socket.send_bytes(_last(_ended(code)))
                await socket.close()
        finally:
            feeding.cancel()
            writer.close()
        return socket


async def _feed(socket: web.WebSocketResponse, writer: asyncio.StreamWriter) -> None:
    """Standard input until it is closed (v5's own message) or the connection is."""
    with suppress(ConnectionError):
        async for message in socket:
            if message.type is not WSMsgType.BINARY or not message.data:
                continue
            if message.data[0] == _CLOSE:
                writer.write_eof()
            elif message.data[0] == _STDIN:
                writer.write(message.data[1:])
                await writer.drain()
    writer.close()


def _ended(code: int) -> Object:
    if code == 0:
        return {"status": "Success"}
    details = {"causes": [{"reason": "ExitCode", "message": str(code)}]}
    message = f"command terminated with exit code {code}"
    return {"status": "Failure", "message": message, "reason": "NonZeroExitCode", "details": details}


def _last(status: Object) -> bytes:
    return bytes([_ERROR]) + json.dumps(status).encode()


def _json(found: Any, code: int = 200) -> web.Response:
    # A charset beside the type, and clients do not read the Status in an error.
    return web.Response(body=json.dumps(found).encode(), status=code, headers={"Content-Type": "application/json"})
