"""Images without an engine at work: linked or exported from one, pulled from a registry, shared, kept while in use."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docker
import pytest
import requests

from app.environments.runtimes.oci import OciProvider
from app.errors import ImageDenied, ImageMissing, ImageUnavailable, ImageUnfit
from app.host import kernel
from app.host.engine import engine_of
from app.images import engine_layers
from app.images.layer_index import forget
from app.images.layer_store import ImageStore, StoredImage
from app.images.pull_source import PullSource, noted
from app.images.references import Reference
from app.images.registry_pull import pull
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from tests.integration.docker_fixture import tags_of
from tests.integration.fake_registry import standing
from tests.integration.oci_fixture import add_image
from tests.services import missing


def _fail(folder: Path) -> int:
    (folder / "half").touch()
    raise ValueError("half way")


LISTING = "find / -xdev -path /proc -prune -o -path /dev -prune -o -path /sys -prune -o -print | sort"
OURS = (
    "/.megaflow-session",
    "/.dockerenv",
    "/etc",
    "/etc/hosts",
    "/etc/hostname",
    "/etc/resolv.conf",
    "/etc/mtab",
    "/testbed",
)


def soon() -> float:
    return time.monotonic() + 60


@pytest.fixture
def layered(docker_engine: str, oci_programs: Path) -> Iterator[str]:
    """An image of the engine: programs, then files deleted, replaced and a folder made anew; its id."""
    client = docker.from_env()
    tag = f"megaflow-test-{uuid.uuid4().hex[:8]}"
    client.api.import_image_from_data(packed(oci_programs), repository=tag)
    script = "mkdir /d; echo 1 > /d/old; rm /bin/tail; chmod 700 /bin/env; chown 12:34 /bin/env"
    ids = [_committed(client, tag, script, tag), _committed(client, tag, "rm -r /d; mkdir /d; echo 2 > /d/new", tag)]
    yield ids[-1]
    client.images.remove(tag, force=True)
    client.close()


def _committed(client: docker.DockerClient, image: str, script: str, tag: str) -> str:
    container = client.containers.run(image, ["/bin/sh", "-c", script], detach=True, network_mode="none")
    try:
        container.wait(timeout=30)
        return str(container.commit(repository=tag).id)
    finally:
        container.remove(force=True)


@pytest.mark.docker
@pytest.mark.parametrize("way", ["linked", "exported"])
def test_an_engines_image_is_the_same_here(
    oci: OciProvider, oci_settings: Settings, layered: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "exported":
        monkeypatch.setattr(engine_layers, "_visible", lambda about, count: [])
    else:
        monkeypatch.setattr(engine_layers, "_export", lambda *anything: None)
    engine = engine_of(Settings(home=oci_settings.home))
    image = engine_layers.take(engine, layered, oci.store, timeout_s=60)
    assert len(image.layers) == 3
    environment = oci.create(EnvironmentSpec(image=image.id), tags_of(oci_settings.installation), timeout_s=30)
    look = f"{LISTING}; stat -c '%n %a %u %g %s' /bin/env /bin/sh /d; cat /d/new"
    here = environment.run(look, timeout_s=30)
    environment.destroy()
    client = docker.from_env()
    there = client.containers.run(layered, ["/bin/sh", "-c", look], remove=True, network_mode="none")
    client.close()

    def told(output: bytes) -> list[str]:
        return [line for line in output.decode().splitlines() if line not in OURS]

    assert told(here.stdout) == told(there)
    assert "/d/old" not in told(here.stdout)
    assert "/bin/tail" not in told(here.stdout)
    if way == "linked":
        (program,) = (oci.store.layers / image.layers[0]).glob("bin/bash")
        assert program.stat().st_nlink > 1, "the engine's files were copied, not linked"


def sha(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def push_blob(base: str, data: bytes) -> str:
    where = requests.post(f"{base}/blobs/uploads/", timeout=10).headers["Location"]
    mark = "&" if "?" in where else "?"
    assert requests.put(f"{where}{mark}digest={sha(data)}", data=data, timeout=10).status_code == 201
    return sha(data)


def push_manifest(base: str, version: str, content: dict[str, object]) -> str:
    data = json.dumps(content).encode()
    headers = {"Content-Type": str(content["mediaType"])}
    assert requests.put(f"{base}/manifests/{version}", data=data, headers=headers, timeout=10).status_code == 201
    return sha(data)


def packed(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for entry in sorted(folder.iterdir()):
            tar.add(entry, entry.name)
    return buffer.getvalue()


def zstd(data: bytes) -> bytes:
    if shutil.which("zstd") is None:
        missing("the program zstd")
    return subprocess.run(["zstd", "-c"], input=data, capture_output=True, check=True).stdout


def _kind(layer: bytes) -> str:
    compression = {b"\x1f\x8b": "+gzip", b"\x28\xb5": "+zstd"}.get(layer[:2], "")
    return f"application/vnd.oci.image.layer.v1.tar{compression}"


def push_image(
    host: str,
    name: str,
    blobs: list[tuple[bytes, bytes]],
    architecture: str,
    tag: str = "latest",
    *,
    system: str = "linux",
    listed: str | None = "",
) -> str:
    """Push layers, each as it is and as it is sent, under an index with one architecture; the image's id.

    listed: the architecture that the index says, if another; None: no index, the manifest alone.
    """
    base = f"http://{host}/v2/{name}"
    diff_ids = [sha(plain) for plain, _ in blobs]
    config = {"architecture": architecture, "os": system, "config": {"Env": ["A=b"]}}
    config_data = json.dumps({**config, "rootfs": {"type": "layers", "diff_ids": diff_ids}}).encode()
    layers = [{"mediaType": _kind(sent), "size": len(sent), "digest": push_blob(base, sent)} for _, sent in blobs]
    kind = "application/vnd.oci.image.manifest.v1+json"
    about = {"mediaType": "application/vnd.oci.image.config.v1+json", "size": len(config_data)}
    manifest = {"schemaVersion": 2, "mediaType": kind, "layers": layers}
    manifest["config"] = {**about, "digest": push_blob(base, config_data)}
    if listed is None:
        push_manifest(base, tag, manifest)
        return sha(config_data)
    size = len(json.dumps(manifest).encode())
    digest = push_manifest(base, sha(json.dumps(manifest).encode()), manifest)
    platform = {"os": "linux", "architecture": listed or architecture}
    entry = {"mediaType": kind, "digest": digest, "size": size, "platform": platform}
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [entry]}
    push_manifest(base, tag, index)
    return sha(config_data)


def test_an_image_is_pulled_without_an_engine_and_once(
    oci: OciProvider, oci_settings: Settings, registry: str, oci_programs: Path, tmp_path: Path
) -> None:
    (tmp_path / "layer").mkdir()
    (tmp_path / "layer" / "second").write_text("zstd")
    first, second = packed(oci_programs), packed(tmp_path / "layer")
    half = len(first) // 2
    parts = gzip.compress(first[:half], 1) + gzip.compress(first[half:], 1)
    image_id = push_image(registry, "some/image", [(first, parts), (second, zstd(second))], kernel.machine())
    spec = EnvironmentSpec(image=f"{registry}/some/image")

    def prepared(_: int) -> tuple[str, PullSource]:
        with noted() as arrivals:
            return oci.prepare_image(spec, timeout_s=60), arrivals.longest

    with ThreadPoolExecutor(3) as threads:
        found = set(threads.map(prepared, range(3)))
    assert {identity for identity, _ in found} == {image_id}
    assert (image_id, PullSource.PULL) in found
    assert prepared(0) == (image_id, PullSource.HERE)
    environment = oci.create(spec, tags_of(oci_settings.installation), timeout_s=30)
    assert environment.run('echo "$A $(cat /second)"', timeout_s=10).stdout == b"b zstd\n"
    environment.destroy()


@pytest.mark.parametrize(
    ("architecture", "system", "listed", "found"),
    [
        ("s390x", "linux", None, "linux/s390x"),
        (kernel.machine(), "windows", None, f"windows/{kernel.machine()}"),
        ("s390x", "linux", kernel.machine(), "linux/s390x"),  # the list says what the image does not
    ],
)
def test_an_image_for_another_machine_or_system_is_refused_by_its_own_word_and_leaves_nothing(
    tmp_path: Path, registry: str, architecture: str, system: str, listed: str | None, found: str
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "f").write_text("foreign")
    plain, store = packed(tmp_path / "a"), ImageStore(tmp_path / "home")
    push_image(registry, "x", [(plain, plain)], architecture, system=system, listed=listed)
    wanted = f"expected an image for linux/{kernel.machine()}, found {found}; name an image for this machine"
    with pytest.raises(ImageUnfit, match=wanted):
        pull(Reference.parse(f"{registry}/x"), store, soon())
    assert not list(tmp_path.glob("home/**/*.json"))
    assert list(store.layers.iterdir()) == []


def test_a_layer_with_another_content_than_its_configuration_says_is_refused(tmp_path: Path, registry: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "f").write_text("real")
    plain = packed(tmp_path / "a")
    push_image(registry, "x", [(plain + b"\0" * 512, plain)], kernel.machine())
    store = ImageStore(tmp_path / "home")
    with pytest.raises(ImageUnavailable, match="a layer is damaged"):
        pull(Reference.parse(f"{registry}/x"), store, soon())
    assert list(store.layers.iterdir()) == []
    assert store.images() == []


def test_without_an_engine_an_image_is_missing_only_where_all_who_may_have_it_said_so(
    oci_settings: Settings, registry: str
) -> None:
    def refused(mirror: str) -> type[ImageUnavailable]:
        settings = oci_settings.model_copy(update={"image_mirror": mirror})
        with pytest.raises(ImageUnavailable, match="could not be pulled") as found:
            OciProvider(settings, fetch_bundle=lambda bundle: b"").prepare_image(
                EnvironmentSpec(image=f"{registry}/no/such:1"), timeout_s=30
            )
        return type(found.value)

    assert refused(f"{registry}/mirror") is ImageMissing
    assert refused("127.0.0.1:1/mirror") is ImageUnavailable
    with standing() as closed:
        closed.wants, closed.login = "Basic", "me:word"
        assert refused(closed.host) is ImageDenied


def test_an_image_in_use_is_not_removed_and_shared_layers_stay(
    oci: OciProvider, oci_settings: Settings, oci_programs: Path, tmp_path: Path
) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "f").write_text("x" * 1000)
    home, shared = oci_settings.home, {"sha256:programs": oci_programs}
    small, large = add_image(oci.store, shared), add_image(oci.store, {**shared, "sha256:more": tmp_path / "more"})
    environment = oci.create(EnvironmentSpec(image=large), tags_of(oci_settings.installation), timeout_s=30)
    assert forget(home, large) == 0
    assert oci.store.image(large) is not None
    assert environment.run("cat /f | head -c 1", timeout_s=10).stdout == b"x"
    environment.destroy()
    assert forget(home, large) == 1000
    assert (oci.store.image(large), oci.store.image(small) is not None) == (None, True)
    assert forget(home, small) > 0
    assert [one for one in oci.store.layers.iterdir() if not one.name.startswith("y")] == []


def test_a_layer_that_could_not_be_made_leaves_nothing(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    with pytest.raises(ValueError, match="half way"):
        store.add_layer("name", _fail, timeout_s=1)
    assert list(store.layers.iterdir()) == []


def test_what_killed_processes_left_is_tidied_away(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    half = StoredImage("sha256:half", ("here", "never"))
    store.remember("example.test/half:1", half.id)
    with store.making(half), store.making(half):  # two processes at the same image
        store.add_layer("here", lambda folder: 1, timeout_s=1)
        store.add_layer("nobodys", lambda folder: 10, timeout_s=1)
        for left in (".new-x", ".old-x"):
            (store.layers / left / "deep").mkdir(parents=True)
        assert store.tidy(keep=set) == 10
        assert [one.name for one in store.layers.iterdir()] == ["here"]
    assert store.tidy(keep=set) == 1, "nobody makes it any more: it was killed, or had no room"
    assert list(store.layers.iterdir()) == list((tmp_path / "images" / "oci" / "references").iterdir()) == []
