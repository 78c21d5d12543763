"""The images of this host as a cache: what goes, what stays, and what is pulled ahead, on a real engine."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from app.errors import DiskFull
from app.host.engine import Engine
from app.images.cache import ImageCache
from app.images.compose_images import Parts
from app.images.metadata import ImageMetadata
from app.images.prefetch import Prefetcher
from app.images.references import key_of
from app.images.task_images import Images
from app.models.spec import Compose, EnvironmentSpec
from app.settings import Settings
from tests.integration import test_images
from tests.integration.test_images import Contexts
from tests.services import small_disk

pytestmark = pytest.mark.docker

SMALL = "FROM scratch\nCOPY big /big\nCOPY nonce /nonce\n"
BIG = "x" * 300_000


contexts = test_images.contexts
settings = test_images.settings
images = test_images.images


@pytest.fixture
def cache(settings: Settings, engine: Engine) -> ImageCache:
    return ImageCache(settings, fresh_s=0.0)


Make = Callable[[], tuple[EnvironmentSpec, str]]


@pytest.fixture
def make(images: Images, contexts: Contexts) -> Make:
    """A new image of 300 kB: its spec and its id."""

    def made() -> tuple[EnvironmentSpec, str]:
        spec = contexts.spec(SMALL, big=BIG + uuid.uuid4().hex)
        return spec, images.ensure(spec, timeout_s=60)

    return made


def ours(cache: ImageCache) -> set[str]:
    """Ids of the images that this test brought here."""
    return {image.id for image in cache.look().images if image.ours}


def next_to_go(cache: ImageCache, need_bytes: int = 1) -> list[str]:
    """Ids of what goes for so many bytes, and have it gone: whatever others do to this engine meanwhile."""
    view = cache.look()
    victims = view.victims(need_bytes, time.time(), 0.0)
    assert len(cache.evict(view, victims)) == len(victims)
    return victims


def tight(settings: Settings, over_bytes: int, low_bytes: int | None = None) -> ImageCache:
    """A cache whose high mark is so much below what the images take now."""
    taken = ImageCache(settings).look().image_bytes
    marks = {"image_disk_high": taken - over_bytes, "image_disk_low": taken - (low_bytes or over_bytes)}
    return ImageCache(settings.model_copy(update=marks), fresh_s=0.0)


def test_the_image_needed_last_goes_and_no_more_than_needed(cache: ImageCache, make: Make) -> None:
    made = [make() for _ in range(4)]
    cache.book.note_queue([key_of(made[n][0]) for n in (3, 0, 2, 1)])
    assert set(next_to_go(cache, 400_000)) == {made[1][1], made[2][1]}
    assert ours(cache) == {made[3][1], made[0][1]}


def test_what_a_container_has_or_somebody_keeps_stays(
    settings: Settings, engine: Engine, cache: ImageCache, images: Images, make: Make
) -> None:
    (_, contained), (kept, kept_id), (_, spare) = make(), make(), make()
    container = engine.api.create_container(contained, command=["/nothing"])["Id"]
    try:
        with images.pinned(kept, timeout_s=10):
            assert tight(settings, 10**9).make_room() != []
            assert ours(cache) == {contained, kept_id}
    finally:
        engine.remove(container)
    tight(settings, 10**9).make_room()
    assert ours(cache) == set()
    assert spare not in {image.id for image in cache.look().images}


def test_what_was_here_before_us_or_has_a_name_of_a_person_is_not_ours_to_remove(
    settings: Settings, engine: Engine, cache: ImageCache, make: Make, base_image_tag: str
) -> None:
    _, image_id = make()
    images = Images(settings, fetch_bundle=lambda _: b"")
    images.ensure(EnvironmentSpec(image=base_image_tag), timeout_s=10)
    engine.api.tag(image_id, f"mine-{uuid.uuid4().hex[:8]}", "keep")
    assert tight(settings, 10**9).make_room() == []
    assert images.find(base_image_tag) is not None
    assert images.find(image_id) is not None


def test_a_container_that_comes_between_choice_and_removal_saves_its_image(
    engine: Engine, cache: ImageCache, make: Make
) -> None:
    _, image_id = make()
    view = cache.look()
    container = engine.api.create_container(image_id, command=["/nothing"])["Id"]
    try:
        assert cache.evict(view, [image_id]) == []
    finally:
        engine.remove(container)
    assert len(cache.evict(view, [image_id])) == 1
    assert cache.book.entries() == {}


def test_shared_layers_are_counted_once(
    cache: ImageCache, images: Images, contexts: Contexts, base_image_tag: str
) -> None:
    recipe = "ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nWORKDIR /new\nCOPY big /big\nENV A=1\n"
    made = [images.ensure(contexts.spec(recipe, big=BIG + str(n)), timeout_s=60) for n in range(2)]
    base = images.find(base_image_tag)
    held = {image.id: image for image in cache.look().images}
    below = held[str(base)].layers
    for image_id in made:
        assert held[image_id].layers[: len(below)] == below
        assert sum(layer.size_bytes for layer in held[image_id].layers[len(below) :]) == len(BIG) + 1


def test_when_the_engines_disk_is_full_others_go_and_it_is_tried_again(
    images: Images, cache: ImageCache, contexts: Contexts, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, old = make()
    images._cache = cache
    real, tries = images._build, []

    def full_at_first(*arguments: object) -> str:
        tries.append(arguments)
        if len(tries) == 1:
            raise DiskFull("no space left on device")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(images, "_build", full_at_first)
    found = images.ensure(contexts.spec(SMALL, big=BIG), timeout_s=60)
    assert ours(cache) == {found}
    assert old != found


class Full:
    """A semaphore without a free place."""

    def hold(self, limit: str, capacity: int | None, *, timeout_s: float) -> AbstractContextManager[None]:
        assert timeout_s <= 0
        raise TimeoutError("no place")


def prefetcher(settings: Settings, contexts: Contexts, queue: Sequence[EnvironmentSpec], **more: object) -> Prefetcher:
    return Prefetcher(settings, queue=lambda far: queue, fetch_bundle=contexts.fetch, **more)  # type: ignore[arg-type]


def test_the_next_images_are_fetched_in_the_order_of_the_queue(
    settings: Settings, images: Images, cache: ImageCache, contexts: Contexts, make: Make
) -> None:
    present, _ = make()
    queue = [contexts.spec(SMALL, big="1"), present, contexts.spec(SMALL, big="2"), contexts.spec(SMALL, big="3")]
    ahead = prefetcher(settings.model_copy(update={"image_prefetch": 3}), contexts, queue)
    assert ahead.look()
    assert images.here(queue[0]) is not None
    assert images.here(queue[2]) is None
    assert ahead.look()
    assert not ahead.look()
    assert images.here(queue[1]) is not None
    assert images.here(queue[3]) is None
    assert cache.book.queue() == [key_of(spec) for spec in queue]


def test_nothing_is_pulled_ahead_without_a_free_place_or_above_the_low_mark(
    settings: Settings, images: Images, contexts: Contexts, engine: Engine
) -> None:
    spec = contexts.spec(SMALL, big="1")
    assert not prefetcher(settings, contexts, [spec], semaphore=Full()).look()
    low = settings.model_copy(update={"image_disk_low": 2.0, "image_disk_high": 1e15})
    sights: list[bool] = []

    def queue(far: bool) -> list[EnvironmentSpec]:
        sights.append(far)
        return [spec]

    assert not Prefetcher(low, queue=queue, fetch_bundle=contexts.fetch).look()
    assert sights == [True]
    assert images.here(spec) is None
    assert prefetcher(settings, contexts, [spec]).look()


def test_an_image_that_fails_is_left_to_its_task_and_the_next_one_comes(
    settings: Settings, images: Images, contexts: Contexts, engine: Engine
) -> None:
    queue = [contexts.spec("FROM scratch\nCOPY missing /\n"), contexts.spec(SMALL, big="1")]
    ahead = prefetcher(settings, contexts, queue)
    while ahead.look():
        pass
    assert images.here(queue[1]) is not None


def project(contexts: Contexts, web: str, main: str) -> EnvironmentSpec:
    """Two services: the image `main`, and one that is built, with a file of this content."""
    text = f"services: {{main: {{image: '{main}'}}, web: {{build: ./web}}}}"
    files = {"docker-compose__yaml": text, "web/Dockerfile": SMALL, "web/big": web, "web/nonce": uuid.uuid4().hex}
    build = contexts.spec(None, **files).build
    assert build is not None
    return EnvironmentSpec(compose=Compose(context=build.context))


def test_a_project_is_left_to_its_tasks_and_a_registry_gets_each_of_its_images(
    settings: Settings, contexts: Contexts, base_image_tag: str, engine: Engine
) -> None:
    several = project(contexts, "1", base_image_tag)
    assert not prefetcher(settings, contexts, [several]).look()
    parts = Parts(settings.home / "cache" / "contexts", contexts.fetch)
    main, web = parts.of(several)
    assert main.image == base_image_tag
    assert web.build is not None
    assert b"Dockerfile" in parts.fetch(web.build.context)


def test_a_full_disk_does_not_keep_the_prefetcher_from_its_work_and_nothing_half_written_stays(
    settings: Settings, contexts: Contexts, engine: Engine, tmp_path: Path
) -> None:
    home = tmp_path / "small"
    with small_disk(home, "256k"):
        full = settings.model_copy(update={"home": home})
        ahead = prefetcher(full, contexts, [contexts.spec(SMALL, big="1")])
        with pytest.raises(OSError, match="No space left"):
            (home / "filled").write_bytes(b"x" * (1 << 19))
        assert ahead.look(), "what does not fit is left"
        with pytest.raises(DiskFull, match="free some"):
            ImageMetadata(full).note_queue(["x" * 5000])
        assert [file for file in (home / "cache").rglob("*") if file.is_file()] == []
