"""The images of a host without an engine as a cache: what goes, what stays, what is pulled ahead, a disk that is full.

A real registry, a real store, real environments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.environments.runtimes.oci import OciProvider
from app.errors import DiskFull
from app.host import kernel
from app.host.slots import HostSemaphore
from app.images.cache import ImageCache
from app.images.layer_store import ImageStore
from app.images.metadata import ImageChanges, ImageMetadata
from app.images.prefetch import Prefetcher
from app.images.references import built_for_all, key_of
from app.images.unpacked_images import OciImages
from app.models.spec import Build, Bundle, Compose, EnvironmentSpec
from app.settings import Settings
from megaflow.contract.environments.fixture import sweep_all, tar_of
from tests.integration.docker_fixture import tags_of
from tests.integration.test_images import age
from tests.integration.test_oci_images import packed, push_image
from tests.services import small_disk

KILO = 1000
RECIPE = EnvironmentSpec(build=Build(context=Bundle(sha256="0" * 64, size_bytes=1)))
SEVERAL = EnvironmentSpec(compose=Compose(context=Bundle(sha256="0" * 64, size_bytes=1)))

Push = Callable[..., EnvironmentSpec]


@pytest.fixture
def settings(oci_settings: Settings, oci_cache: Path) -> Settings:
    """With a book of this test's own."""
    cache = oci_settings.home / "cache"
    cache.unlink()
    cache.mkdir()
    for made in oci_cache.iterdir():
        if made.name not in ("images", "contexts"):
            (cache / made.name).symlink_to(made)
    return oci_settings


@pytest.fixture
def provider(settings: Settings) -> Iterator[OciProvider]:
    made = provider_of(settings)
    yield made
    sweep_all(settings)


@pytest.fixture
def cache(settings: Settings) -> ImageCache:
    return ImageCache(settings, fresh_s=0.0)


def provider_of(settings: Settings) -> OciProvider:
    return OciProvider(settings, fetch_bundle=lambda _: b"")


@pytest.fixture
def push(registry: str) -> Push:
    """Put an image of layers into the registry, each of so many bytes that no other layer has, or of such content."""

    def pushed(name: str, *layers: int | bytes) -> EnvironmentSpec:
        blobs = [layer if isinstance(layer, bytes) else a_layer(os.urandom(layer)) for layer in layers]
        push_image(registry, name, [(blob, blob) for blob in blobs], kernel.machine())
        return EnvironmentSpec(image=f"{registry}/{name}", workdir="/")

    return pushed


def a_layer(content: bytes) -> bytes:
    return tar_of({f"f-{os.urandom(4).hex()}": content})


def images_of(settings: Settings) -> OciImages:
    semaphore = HostSemaphore(settings.home / "run" / "slots")
    return OciImages(settings, ImageStore(settings.home.resolve()), fetch_bundle=lambda _: b"", semaphore=semaphore)


def pull(settings: Settings, *specs: EnvironmentSpec) -> list[str]:
    """Ids."""
    return [images_of(settings).ensure(spec, timeout_s=60).id for spec in specs]


def here(settings: Settings) -> set[str]:
    return {image.id for image in ImageStore(settings.home.resolve()).images()}


def layers(settings: Settings) -> int:
    """How many layers of images there are, whole or half made."""
    return sum(not one.name.startswith("y") for one in ImageStore(settings.home.resolve()).layers.iterdir())


def tight(settings: Settings, over_bytes: int) -> Settings:
    """With marks so much below what the images take now."""
    mark = float(ImageCache(settings).look().image_bytes - over_bytes)
    return settings.model_copy(update={"image_disk_high": mark, "image_disk_low": mark})


def evicted(settings: Settings, over_bytes: int) -> list[str]:
    return ImageCache(tight(settings, over_bytes), fresh_s=0.0).make_room()


def test_the_image_needed_last_goes_no_more_than_needed_and_a_shared_layer_stays(
    settings: Settings, cache: ImageCache, push: Push
) -> None:
    shared = a_layer(os.urandom(100 * KILO))
    specs = [push(f"i{n}", shared, 300 * KILO) for n in range(4)]
    ids = pull(settings, *specs)
    assert cache.look().image_bytes == 1300 * KILO
    cache.book.note_queue([key_of(specs[n]) for n in (3, 0, 2, 1)])
    gone = evicted(settings, 400 * KILO)
    assert gone == [specs[1].image, specs[2].image]
    assert here(settings) == {ids[3], ids[0]}
    assert (layers(settings), cache.look().image_bytes) == (3, 700 * KILO)
    assert set(cache.book.entries()) == {ids[3], ids[0]}
    assert evicted(settings, 700 * KILO) == [specs[0].image, specs[3].image]
    assert layers(settings) == 0
    assert pull(settings, specs[0]) == [ids[0]], "it can be had again"


def test_what_was_just_used_stays_and_of_what_nobody_needs_the_longest_unused_goes(
    settings: Settings, push: Push
) -> None:
    specs = [push(f"i{n}", 10 * KILO) for n in range(3)]
    pull(settings, *specs)
    age(settings)
    pull(settings, specs[0])
    patient = ImageCache(tight(settings, 30 * KILO))
    assert sorted(patient.make_room()) == [specs[1].image, specs[2].image]
    assert patient.make_room() == []


def test_a_kept_set_up_that_nobody_needs_goes_before_any_image(
    settings: Settings, provider: OciProvider, cache: ImageCache, push: Push, oci_programs: Path
) -> None:
    spec = push("programs", packed(oci_programs)).model_copy(update={"setup": ("echo made > /made",)})
    other = push("other", 10 * KILO)
    pull(settings, other)
    environment = provider.create(spec, tags_of(settings.installation), timeout_s=60)
    shown = {image.names[0]: image for image in cache.look().images}
    [set_up] = [image for name, image in shown.items() if name.startswith("setup:")]
    assert (shown[str(spec.image)].containers, shown[str(other.image)].containers) == (1, 0)
    assert set_up.derived
    environment.destroy()
    cache.book.note_queue([key_of(spec)])
    assert evicted(settings, 1) == [other.image], "the queue needs what the set-up was made for"
    pull(settings, other)
    cache.book.note_queue([])
    assert evicted(settings, 1) == [set_up.names[0]]
    assert {image.names[0] for image in cache.look().images} == {spec.image, other.image}
    environment = provider.create(spec, tags_of(settings.installation), timeout_s=60)
    assert environment.run("cat /made", timeout_s=10).stdout == b"made\n"
    environment.destroy()


def test_the_next_images_are_pulled_and_what_takes_an_engine_is_passed_over(settings: Settings, push: Push) -> None:
    specs = [push(f"i{n}", KILO) for n in range(4)]
    ids = pull(settings, specs[1])
    queue = [SEVERAL, specs[0], RECIPE, specs[1], specs[2], specs[3]]
    ahead = prefetcher(settings.model_copy(update={"image_prefetch": 3}), queue)
    assert ahead.look()
    assert ahead.look()
    assert not ahead.look()
    assert here(settings) == {*ids, *pull(settings, specs[0], specs[2])}
    assert ImageMetadata(settings).queue() == [key_of(spec) for spec in specs]


def prefetcher(settings: Settings, queue: list[EnvironmentSpec], **more: object) -> Prefetcher:
    return Prefetcher(settings, queue=lambda _: queue, fetch_bundle=lambda _: b"", **more)  # type: ignore[arg-type]


def test_a_recipe_comes_from_the_mirror_and_the_host_says_that_it_has_it(settings: Settings, registry: str) -> None:
    assert RECIPE.build is not None
    path, _, tag = built_for_all("m", RECIPE.build, settings.base_image).removeprefix("m/").partition(":")
    blob = a_layer(b"built elsewhere")
    image_id = push_image(registry, path, [(blob, blob)], kernel.machine(), tag)
    mirrored = settings.model_copy(update={"image_mirror": registry})
    presence = ImageChanges(mirrored)
    assert key_of(RECIPE) not in presence.here()
    assert prefetcher(mirrored, [RECIPE]).look()
    assert here(settings) == {image_id}
    assert key_of(RECIPE) in presence.here()
    assert evicted(settings, 1) != []
    assert key_of(RECIPE) not in presence.here()


def test_a_disk_that_fills_gets_room_by_what_nobody_needs_else_it_is_told_and_nothing_is_left(
    settings: Settings, push: Push
) -> None:
    with small_disk(settings.home / "images" / "oci", "8m"):
        old, new, huge = push("old", 3_000_000), push("new", 3_000_000), push("huge", 1 * KILO, 6_000_000)
        pull(settings, old)
        age(settings)
        [kept] = pull(settings, new)
        assert here(settings) == {kept}
        with pytest.raises(
            DiskFull, match=r"expected room for image .*/huge, found a full disk .*no image here may go"
        ):
            pull(settings, huge)
        assert here(settings) == {kept}
        age(settings)
        with pytest.raises(DiskFull, match="too little room was left"):
            pull(settings, huge)
        assert (here(settings), layers(settings)) == (set(), 0)
        assert pull(settings, new) == [kept], "the disk is as good as before"
