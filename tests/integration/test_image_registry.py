"""Images and a real registry: busy, closed, of another architecture; a dataset synced, killed, synced on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.errors import ImageDenied, ImageUnavailable
from app.host.engine import Engine
from app.images import references
from app.images.engine_registry import Registries
from app.images.registry_refusals import RefusalKind, RegistryRefusal
from app.images.sync import Item, Sync, SyncOutcome, items_of
from app.images.task_images import Images
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from tests.integration import test_images
from tests.integration.fake_registry import FakeRegistry, Fault, registry_server
from tests.integration.test_images import FROM_BASE, Contexts

pytestmark = pytest.mark.docker

settings = test_images.settings
contexts = test_images.contexts
images = test_images.images
pushed = test_images.pushed


MANIFESTS = "/v2/x/manifests"
SMALL = "FROM scratch\nCOPY nonce /nonce\n"


def until(seconds: float) -> float:
    return time.monotonic() + seconds


def forget(engine: Engine, image_id: str) -> None:
    engine.api.remove_image(image_id, force=True)


@pytest.mark.parametrize("code", [429, 503])
def test_a_busy_registry_is_asked_again(fake: FakeRegistry, settings: Settings, engine: Engine, code: int) -> None:
    fake.faults[MANIFESTS] = [Fault(code)] * 4  # each time the engine asks twice
    found = Images(settings, fetch_bundle=lambda _: b"").ensure(EnvironmentSpec(image=f"{fake.host}/x"), timeout_s=60)
    forget(engine, found)
    assert found == fake.image_id
    assert len([one for one in fake.seen(MANIFESTS) if one.method == "GET"]) >= 3


def test_a_registry_that_stays_busy_is_given_up_with_its_words(
    fake: FakeRegistry, settings: Settings, engine: Engine
) -> None:
    fake.faults[MANIFESTS] = [Fault(429)] * 1000
    with pytest.raises(ImageUnavailable, match="429") as caught:
        Images(settings, fetch_bundle=lambda _: b"").ensure(EnvironmentSpec(image=f"{fake.host}/x"), timeout_s=5)
    assert isinstance(caught.value.__cause__, RegistryRefusal)
    assert caught.value.__cause__.refusal is RefusalKind.BUSY


_WORD = "open sesame"
_HASHED = "me:$2y$05$abcdefghijklmnopqrstuupx2xBUC4954936wVIjyyPHmUBFu0wCW\n"


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[str]:
    """A registry that wants a login."""
    (tmp_path / "htpasswd").write_text(_HASHED)
    with registry_server(f"auth: {{htpasswd: {{realm: r, path: {tmp_path / 'htpasswd'}}}}}\n") as host:
        yield host


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
    source = EnvironmentSpec(image=f"{registry}/{pushed[0]}:v1")
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
