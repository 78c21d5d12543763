"""Images and a real registry: busy, closed, of another architecture; a dataset synced, killed, synced on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from app.errors import ImageDenied, ImageUnavailable, ImageUnfit
from app.host.engine import Engine
from app.images import references
from app.images.engine_registry import Registries
from app.images.registry_refusals import RefusalKind, RegistryRefusal
from app.images.sync import Item, Sync, SyncOutcome, items_of
from app.images.task_images import Images
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from tests.integration import test_images
from tests.integration.test_images import FROM_BASE, Contexts
from tests.services import serving

pytestmark = pytest.mark.docker

registry = test_images.registry

SMALL = "FROM scratch\nCOPY nonce /nonce\n"


@pytest.fixture
def contexts() -> Contexts:
    return Contexts()


@pytest.fixture
def settings(tmp_path: Path, docker_engine: str) -> Settings:
    return Settings(home=tmp_path / "home", installation=f"test-{uuid.uuid4().hex[:8]}")


def until(seconds: float) -> float:
    return time.monotonic() + seconds


def forget(engine: Engine, image_id: str) -> None:
    engine.api.remove_image(image_id, force=True)


@pytest.fixture
def pushed(
    registry: str,
    settings: Settings,
    engine: Engine,
    contexts: Contexts,
) -> Iterator[tuple[str, str]]:
    """A small image that only the registry has: its path there, and its id."""
    image_id = Images(settings, fetch_bundle=contexts.fetch).ensure(contexts.spec(SMALL), timeout_s=60)
    path = f"some/image-{uuid.uuid4().hex[:8]}:v1"
    name, _, tag = f"{registry}/{path}".rpartition(":")
    engine.api.tag(image_id, name, tag)
    Registries(engine, settings).push(f"{registry}/{path}", until(30))
    forget(engine, image_id)
    yield path, image_id
    if any(image["Id"] == image_id for image in engine.api.images(all=True)):
        forget(engine, image_id)


# --- Refused ----------------------------------------------------------------------------------------------------------


class Moody(BaseHTTPRequestHandler):
    """Stands before a real registry and refuses what it has been told to, so many times."""

    behind = ""
    refusing = 0
    code = 429
    asked: list[float] = []

    def do_GET(self) -> None:
        if "/manifests/" in self.path and self.command == "GET":
            type(self).asked.append(time.monotonic())
            type(self).refusing -= 1
        if "/manifests/" in self.path and type(self).refusing >= 0:
            self._answer(self.code, {}, b"")
            return
        kept = {name: self.headers[name] for name in ("Accept", "Authorization") if self.headers[name]}
        asked = urllib.request.Request(f"http://{self.behind}{self.path}", headers=kept, method=self.command)
        try:
            with urllib.request.urlopen(asked) as reply:
                self._answer(reply.status, dict(reply.headers), reply.read())
        except urllib.error.HTTPError as error:
            with error:
                self._answer(error.code, dict(error.headers), error.read())

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, code: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(code)
        for name, value in headers.items():
            if name not in ("Connection", "Content-Length"):
                self.send_header(name, value)
        self.send_header("Content-Length", headers.get("Content-Length") or str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def moody(registry: str) -> Iterator[tuple[str, type[Moody]]]:
    handler = type("_Moody", (Moody,), {"behind": registry, "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}", handler
        server.shutdown()


@pytest.mark.parametrize("code", [429, 503])
def test_a_busy_registry_is_asked_again(
    moody: tuple[str, type[Moody]], pushed: tuple[str, str], settings: Settings, engine: Engine, code: int
) -> None:
    (address, handler), (path, image_id) = moody, pushed
    handler.refusing, handler.code = 2, code
    found = Images(settings, fetch_bundle=lambda _: b"").ensure(
        EnvironmentSpec(image=f"{address}/{path}"), timeout_s=60
    )
    assert found == image_id
    assert len(handler.asked) >= 3


def test_a_registry_that_stays_busy_is_given_up_with_its_words(
    moody: tuple[str, type[Moody]], pushed: tuple[str, str], settings: Settings, engine: Engine
) -> None:
    (address, handler), (path, _) = moody, pushed
    handler.refusing = 1000
    with pytest.raises(ImageUnavailable, match="429") as caught:
        Images(settings, fetch_bundle=lambda _: b"").ensure(EnvironmentSpec(image=f"{address}/{path}"), timeout_s=5)
    assert isinstance(caught.value.__cause__, RegistryRefusal)
    assert caught.value.__cause__.refusal is RefusalKind.BUSY


def test_an_image_for_another_architecture_names_both(
    registry: str,
    settings: Settings,
    engine: Engine,
    contexts: Contexts,
    tmp_path: Path,
) -> None:
    made = Images(settings, fetch_bundle=contexts.fetch).ensure(contexts.spec(SMALL), timeout_s=60)
    folder = tmp_path / "saved"
    folder.mkdir()
    saved = subprocess.run(["docker", "save", made], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=saved, check=True)
    forget(engine, made)
    manifest = json.loads((folder / "manifest.json").read_text())
    config = folder / manifest[0]["Config"]
    config.write_text(config.read_text().replace('"architecture":"amd64"', '"architecture":"s390x"'))
    tag = f"{registry}/some/foreign-{uuid.uuid4().hex[:8]}:1"
    (folder / "manifest.json").write_text(json.dumps([{**manifest[0], "RepoTags": [tag]}]))
    packed = subprocess.run(["tar", "-c", "-C", str(folder), "."], check=True, capture_output=True).stdout
    subprocess.run(["docker", "load"], input=packed, check=True, capture_output=True)
    try:
        with pytest.raises(ImageUnfit, match=r"built for s390x, this engine runs amd64"):
            Images(settings, fetch_bundle=contexts.fetch).ensure(EnvironmentSpec(image=tag), timeout_s=60)
        Registries(engine, settings).push(tag, until(30))
    finally:
        forget(engine, tag)
    with pytest.raises(ImageUnfit, match=r"built for s390x, this engine runs amd64"):
        Images(settings, fetch_bundle=contexts.fetch).ensure(EnvironmentSpec(image=tag), timeout_s=60)
    forget(engine, tag)


# --- Credentials ------------------------------------------------------------------------------------------------------

_WORD = "open sesame"
_HASHED = "me:$2y$05$abcdefghijklmnopqrstuupx2xBUC4954936wVIjyyPHmUBFu0wCW\n"


@pytest.fixture
def closed(tmp_path: Path, registry: str) -> Iterator[str]:
    """A registry that wants a login."""
    program = shutil.which("docker-registry")
    assert program is not None  # else `registry` has skipped
    (tmp_path / "htpasswd").write_text(_HASHED)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "closed.yml").write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {tmp_path / 'closed'}}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\nauth: {{htpasswd: {{realm: r, path: {tmp_path / 'htpasswd'}}}}}\n"
    )
    with serving(
        (program, "serve", str(tmp_path / "closed.yml")), logfile=tmp_path / "log", user=None, stop=signal.SIGTERM
    ):
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"


def test_a_closed_registry_opens_to_the_settings_login_alone(
    closed: str, settings: Settings, engine: Engine, contexts: Contexts, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = contexts.spec(SMALL)
    login = settings.model_copy(
        update={"registry_auth": Settings(registry_auth=json.dumps({closed: f"me:{_WORD}"})).registry_auth}
    )
    [item] = items_of([spec], closed, settings.base_image)
    assert item.target is not None
    refused = Sync(settings, closed, fetch_bundle=contexts.fetch).one(item)
    assert (refused.outcome, refused.error) == (SyncOutcome.FAILED, "ImageDenied")
    assert "basic auth" in str(refused.message)
    assert Sync(login, closed, fetch_bundle=contexts.fetch).one(item).outcome is SyncOutcome.BUILT
    image_id = Images(settings, fetch_bundle=contexts.fetch).ensure(spec, timeout_s=60)
    forget(engine, image_id)
    with pytest.raises(RegistryRefusal) as caught:
        Registries(engine, settings).pull(item.target, until(20))
    assert caught.value.refusal is RefusalKind.DENIED
    with pytest.raises(ImageDenied, match="basic auth"):
        Images(settings, fetch_bundle=contexts.fetch).ensure(EnvironmentSpec(image=item.target), timeout_s=20)
    Registries(engine, login).pull(item.target, until(20))
    forget(engine, item.target)
    assert _WORD not in "".join(capfd.readouterr())


def test_a_closed_registry_opens_to_the_helper_that_docker_login_uses(
    closed: str,
    settings: Settings,
    engine: Engine,
    contexts: Contexts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [item] = items_of([contexts.spec(SMALL)], closed, settings.base_image)
    kept = tmp_path / "docker"
    kept.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(kept))
    monkeypatch.setenv("PATH", f"{kept}:{os.environ['PATH']}")
    program = kept / "docker-credential-mine"
    program.write_text("#!/bin/sh\necho the keyring is locked\nexit 1\n")
    program.chmod(0o755)
    (kept / "config.json").write_text(json.dumps({"credHelpers": {closed: "mine"}}))
    refused = Sync(settings, closed, fetch_bundle=contexts.fetch).one(item)
    assert (refused.outcome, refused.error) == (SyncOutcome.FAILED, "ImageDenied")
    program.write_text(f"""#!/bin/sh\necho '{json.dumps({"Username": "me", "Secret": _WORD})}'\n""")
    assert Sync(settings, closed, fetch_bundle=contexts.fetch).one(item).outcome is SyncOutcome.BUILT
    assert item.target is not None
    forget(engine, item.target)
    Registries(engine, settings).pull(item.target, until(20))
    forget(engine, item.target)


# --- A dataset --------------------------------------------------------------------------------------------------------


def outcomes(sync: Sync, items: list[Item]) -> dict[str, SyncOutcome]:
    return {done.item.key: done.outcome for done in sync.run(items, jobs=3)}


def test_a_dataset_is_synced_once_and_one_failure_keeps_nobody(
    registry: str,
    pushed: tuple[str, str],
    settings: Settings,
    engine: Engine,
    contexts: Contexts,
    base_image_tag: str,
) -> None:
    prefix = f"{registry}/set-{uuid.uuid4().hex[:8]}"
    good, bad = contexts.spec(SMALL), contexts.spec(FROM_BASE + "RUN exit 3\n")
    source = EnvironmentSpec(image=f"{registry}/{pushed[0]}")
    nowhere = EnvironmentSpec(image=f"{registry}/not/there:1")
    items = items_of([good, bad, source, nowhere, good], prefix, settings.base_image)
    sync = Sync(settings, prefix, fetch_bundle=contexts.fetch)
    found = {done.item.key: done for done in sync.run(items, jobs=3)}
    assert {key: (done.outcome, done.error) for key, done in found.items()} == {
        references.key_of(good): (SyncOutcome.BUILT, None),
        references.key_of(bad): (SyncOutcome.FAILED, "ImageBuildFailed"),
        references.key_of(source): (SyncOutcome.COPIED, None),
        references.key_of(nowhere): (SyncOutcome.FAILED, "ImageMissing"),
    }
    fetched = contexts.fetched
    again = outcomes(Sync(settings, prefix, fetch_bundle=contexts.fetch), items[::2])
    assert set(again.values()) == {SyncOutcome.PRESENT}
    assert contexts.fetched == fetched


def test_a_worker_takes_what_was_synced_and_builds_nothing(
    registry: str,
    settings: Settings,
    engine: Engine,
    contexts: Contexts,
    tmp_path: Path,
) -> None:
    mirror = f"{registry}/set-{uuid.uuid4().hex[:8]}"
    spec = contexts.spec(SMALL)
    [item] = items_of([spec], mirror, settings.base_image)
    assert Sync(settings, mirror, fetch_bundle=contexts.fetch).one(item).outcome is SyncOutcome.BUILT
    image_id = Images(settings, fetch_bundle=contexts.fetch).ensure(spec, timeout_s=60)
    forget(engine, image_id)
    elsewhere = settings.model_copy(update={"image_mirror": mirror, "home": tmp_path / "other"})
    fetched = contexts.fetched
    worker = Images(elsewhere, fetch_bundle=contexts.fetch)
    assert worker.ensure(spec, timeout_s=60) == image_id
    assert worker.ensure(spec, timeout_s=60) == image_id
    assert contexts.fetched == fetched
    assert engine.api.inspect_image(image_id)["RepoTags"] == [item.target]


@pytest.mark.parametrize("mirror", ["127.0.0.1:1", None])
def test_a_mirror_that_cannot_help_is_no_obstacle_to_a_build(
    registry: str,
    settings: Settings,
    engine: Engine,
    contexts: Contexts,
    mirror: str | None,
) -> None:
    chosen = mirror or f"{registry}/empty"
    images = Images(settings.model_copy(update={"image_mirror": chosen}), fetch_bundle=contexts.fetch)
    assert images.ensure(contexts.spec(SMALL), timeout_s=60).startswith("sha256:")


def test_an_image_pinned_by_digest_is_found_in_the_mirror(
    registry: str,
    pushed: tuple[str, str],
    settings: Settings,
    engine: Engine,
    contexts: Contexts,
) -> None:
    path, image_id = pushed
    found = Registries(engine, settings).look(f"{registry}/{path}", until(10))
    assert found is not None
    pinned = EnvironmentSpec(image=f"{registry}/{path.rpartition(':')[0]}@{found}")
    mirror = f"{registry}/set-{uuid.uuid4().hex[:8]}"
    [item] = items_of([pinned], mirror, settings.base_image)
    assert Sync(settings, mirror, fetch_bundle=contexts.fetch).one(item).outcome is SyncOutcome.COPIED
    forget(engine, image_id)
    lost = pinned.model_copy(update={"image": str(pinned.image).replace(registry, "127.0.0.1:1", 1)})
    worker = Images(settings.model_copy(update={"image_mirror": mirror}), fetch_bundle=contexts.fetch)
    assert worker.ensure(lost, timeout_s=60) == image_id


_KILLED = """
import logging, structlog, sys
from pathlib import Path
from app.images.sync import Sync, items_of
from app.models.spec import EnvironmentSpec
from app.settings import Settings
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
folder, settings, to = Path(sys.argv[1]), Settings.model_validate_json(sys.argv[2]), sys.argv[3]
specs = [EnvironmentSpec.model_validate_json(line) for line in (folder / "specs").read_text().splitlines()]
fetch = lambda bundle: (folder / bundle.sha256).read_bytes()
for done in Sync(settings, to, fetch_bundle=fetch).run(items_of(specs, to, settings.base_image), jobs=1):
    print(done.outcome.value, flush=True)
"""


def test_a_sync_that_is_killed_goes_on_where_it_was(
    registry: str,
    settings: Settings,
    engine: Engine,
    contexts: Contexts,
    tmp_path: Path,
) -> None:
    to = f"{registry}/set-{uuid.uuid4().hex[:8]}"
    specs = [contexts.spec(SMALL) for _ in range(3)]
    (tmp_path / "specs").write_text("\n".join(spec.model_dump_json() for spec in specs))
    for spec in specs:
        assert spec.build is not None
        (tmp_path / spec.build.context.sha256).write_bytes(contexts.fetch(spec.build.context))
    argv = [sys.executable, "-c", _KILLED, str(tmp_path), settings.model_dump_json(), to]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "built\n"
        first.kill()
    second = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    said = second.stdout.split()
    assert said[0] == "present", second.stderr
    assert sorted(set(said)) == ["built", "present"]
    items = items_of(specs, to, settings.base_image)
    assert set(outcomes(Sync(settings, to, fetch_bundle=contexts.fetch), items).values()) == {SyncOutcome.PRESENT}
