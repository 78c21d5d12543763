"""The keeper: what it makes ahead, hands out, and gives back; with environments that are only noted."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.environments.base import Tags
from app.environments.host_slots import HostGate
from app.environments.warm import AheadGate, Keeper, Key, Warm, Wish, ahead, keeper, wire
from app.errors import AgentUnavailable, DatabaseUnavailable, EnvironmentFailed
from app.models.spec import Bundle, Compose, EnvironmentKind, EnvironmentSpec, Network, Resources, Reuse
from tests.patience import eventually
from tests.services import short_folder
from tests.unit.warm_fake import FakeEnvironment, FakeProvider, World, an_attempts


@pytest.fixture
def home() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def provider(world: World) -> FakeProvider:
    return FakeProvider(world)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "_LOOK_S", 0.02)
    monkeypatch.setattr(keeper, "_AWAY_S", 0.02)
    monkeypatch.setattr(ahead, "_ABSENT_S", 0.02)
    monkeypatch.setattr(ahead, "_BUSY_S", 0.02)


class Queue:
    """What the tasks will need; changed by the test."""

    def __init__(self, *images: str) -> None:
        self.specs = [EnvironmentSpec(image=image) for image in images]
        self.away = False

    def __call__(self) -> Sequence[Wish]:
        if self.away:
            raise DatabaseUnavailable("away")
        return [Wish(spec, 30.0) for spec in self.specs]

    def set(self, *images: str) -> None:
        self.specs = [EnvironmentSpec(image=image) for image in images]


@contextmanager
def keeping(
    home: Path, provider: FakeProvider, queue: Callable[[], Sequence[Wish]], *, most: int = 4, grace_s: float = 60.0
) -> Iterator[threading.Event]:
    stop = threading.Event()
    kept = Keeper(home, "test", queue=queue, provide=lambda kind: provider, most=most, grace_s=grace_s)
    thread = threading.Thread(target=kept.run, args=(stop,))
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()


def images(world: World, provider: FakeProvider) -> list[str]:
    return sorted(provider.made[identity].spec.label for identity in list(world.alive))


def take(
    home: Path, provider: FakeProvider, image: str, tags: Tags | None = None, **more: object
) -> FakeEnvironment | None:
    spec = EnvironmentSpec(image=image).model_copy(update=more)
    found = Warm(home).take(provider, spec, Key.of(spec, f"id-of-{image}"), tags or an_attempts())
    assert found is None or isinstance(found, FakeEnvironment)
    return found


def soon_taken(home: Path, provider: FakeProvider, image: str, tags: Tags | None = None) -> FakeEnvironment:
    """From a keeper that has one, or puts it onto its shelf in a moment: what has been made is not yet ready."""
    found = eventually(lambda: take(home, provider, image, tags))
    assert isinstance(found, FakeEnvironment)
    return found


# --- What is made, and what goes ------------------------------------------------------------------------------------


def test_the_next_tasks_find_theirs_ready_and_never_more_than_there_may_be(
    home: Path, world: World, provider: FakeProvider
) -> None:
    with keeping(home, provider, Queue(*"aabcdefg"), most=4):
        eventually(lambda: images(world, provider) == ["a", "a", "b", "c"])
        time.sleep(0.1)
        assert world.most_alive == 4
    assert world.alive == {}, "what was ready is given back when the keeper leaves"
    assert not wire.address(home).exists()


def test_what_has_gone_to_a_task_is_replaced_by_what_the_next_one_needs(
    home: Path, world: World, provider: FakeProvider
) -> None:
    queue = Queue(*"abc")
    with keeping(home, provider, queue, most=2):
        eventually(lambda: images(world, provider) == ["a", "b"])
        tags = an_attempts()
        taken = soon_taken(home, provider, "a", tags)
        assert world.alive[taken.id] is tags, "it is the attempt's from now on"
        assert taken.describe()["path"] == "warm"
        queue.set(*"bc")
        eventually(lambda: images(world, provider) == ["a", "b", "c"])
    assert list(world.alive) == [taken.id], "what was handed out is no longer the keeper's to end"


def test_what_was_taken_is_not_made_again_for_a_queue_that_was_read_before(
    home: Path, world: World, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_LOOK_S", 60.0)
    with keeping(home, provider, Queue(*"ab"), most=4):
        eventually(lambda: images(world, provider) == ["a", "b"])
        soon_taken(home, provider, "a")
        time.sleep(0.1)
        assert [spec.image for spec in provider.created].count("a") == 1


def test_what_no_task_needs_goes_when_it_has_been_cold_for_a_while(
    home: Path, world: World, provider: FakeProvider
) -> None:
    queue = Queue("a", "b")
    with keeping(home, provider, queue, grace_s=0.3):
        eventually(lambda: images(world, provider) == ["a", "b"])
        queue.set("b")
        time.sleep(0.15)
        assert images(world, provider) == ["a", "b"], "the next run may be on its way"
        eventually(lambda: images(world, provider) == ["b"])


def test_what_is_cold_makes_room_at_once_for_what_is_needed(home: Path, world: World, provider: FakeProvider) -> None:
    queue = Queue("a", "a", "b")
    with keeping(home, provider, queue, most=3):
        eventually(lambda: images(world, provider) == ["a", "a", "b"])
        queue.set("c", "b", "d")
        eventually(lambda: images(world, provider) == ["b", "c", "d"], within_s=20)  # cold they are after a minute
        assert world.most_alive == 3


def test_a_ledger_that_is_away_changes_nothing(home: Path, world: World, provider: FakeProvider) -> None:
    queue = Queue("a")
    with keeping(home, provider, queue, grace_s=0.05):
        eventually(lambda: images(world, provider) == ["a"])
        queue.away = True
        time.sleep(0.2)
        assert images(world, provider) == ["a"]


def test_an_image_that_is_not_here_is_waited_for_and_keeps_nobody_from_the_others(
    home: Path, world: World, provider: FakeProvider
) -> None:
    provider.absent = {"a"}
    with keeping(home, provider, Queue("a", "b")):
        eventually(lambda: images(world, provider) == ["b"])
        provider.absent = set()
        eventually(lambda: images(world, provider) == ["a", "b"])


def test_who_is_fetching_an_image_is_not_waited_for_and_less_and_less_often_asked(
    home: Path, world: World, provider: FakeProvider
) -> None:
    provider.absent = {"a", "b"}
    with keeping(home, provider, Queue("a", "b", "c")):
        eventually(lambda: images(world, provider) == ["c"])
        time.sleep(0.4)
        assert provider.prepared == ["c"], "nobody waits where an image is fetched"
        assert provider.looked.count("a") <= 6, "20 ms, 40 ms, 80 ms…"


def test_images_that_are_needed_much_later_are_not_asked_for_yet(
    home: Path, world: World, provider: FakeProvider
) -> None:
    far = [f"i{number}" for number in range(50)]
    provider.absent = set(far)
    with keeping(home, provider, Queue(*far), most=2):
        eventually(lambda: len(set(provider.looked)) == 8)
        time.sleep(0.1)
        assert set(provider.looked) == set(far[:8])


def test_one_of_another_image_than_was_found_is_handed_to_nobody(
    home: Path, world: World, provider: FakeProvider
) -> None:
    provider.moved["a"] = "another"
    with keeping(home, provider, Queue("a"), most=1):
        eventually(lambda: len(provider.created) > 1)
        assert take(home, provider, "a") is None
        provider.moved.clear()
        soon_taken(home, provider, "a")


def test_an_engine_that_does_not_end_one_keeps_nobody_from_having_another_made(
    home: Path, world: World, provider: FakeProvider
) -> None:
    queue, ended = Queue("a", "b"), threading.Event()
    with keeping(home, provider, queue, most=3, grace_s=0.05):
        eventually(lambda: images(world, provider) == ["a", "b"])
        (cold,) = (one for one in provider.made.values() if one.spec.image == "a")
        cold.end_blocked = ended
        queue.set("b", "c")
        eventually(lambda: images(world, provider) == ["a", "b", "c"])
        queue.set("b", "c", "d")
        time.sleep(0.15)
        assert world.most_alive == 3, "what is being ended takes a place"
        soon_taken(home, provider, "b")
        ended.set()
        eventually(lambda: cold.id not in world.alive)


def test_what_cannot_be_made_is_left_to_its_task(home: Path, world: World, provider: FakeProvider) -> None:
    provider.broken["a"] = EnvironmentFailed("its set-up fails")
    tried: list[str] = []
    provider.broken = Tried(provider.broken, tried)
    with keeping(home, provider, Queue("a", "b")):
        eventually(lambda: images(world, provider) == ["b"])
        time.sleep(0.15)
        assert tried.count("a") == 1


class Tried(dict[str, Exception]):
    def __init__(self, known: dict[str, Exception], tried: list[str]) -> None:
        super().__init__(known)
        self._tried = tried

    def get(self, key: str, default: object = None) -> Exception | None:  # type: ignore[override]
        self._tried.append(key)
        return super().get(key)


def test_one_that_found_no_place_is_tried_again_soon(home: Path, world: World, provider: FakeProvider) -> None:
    busy = EnvironmentFailed("no place")
    busy.__cause__ = TimeoutError()
    provider.broken["a"] = busy
    with keeping(home, provider, Queue("a")):
        time.sleep(0.1)
        del provider.broken["a"]
        eventually(lambda: images(world, provider) == ["a"])


def test_one_whose_tool_is_not_installed_yet_is_tried_again_when_it_may_be(
    home: Path, world: World, provider: FakeProvider
) -> None:
    provider.broken["a"] = AgentUnavailable("not installed yet")
    with keeping(home, provider, Queue("a", "b")):
        eventually(lambda: images(world, provider) == ["b"])
        del provider.broken["a"]
        eventually(lambda: sorted(images(world, provider)) == ["a", "b"])


def test_when_no_place_is_free_nothing_else_asks_for_one_either(
    home: Path, world: World, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_BUSY_S", 60.0)
    busy, tried = EnvironmentFailed("no place"), list[str]()
    busy.__cause__ = TimeoutError()
    provider.broken = Tried(dict.fromkeys("abcdefgh", busy), tried)
    with keeping(home, provider, Queue(*"abcdefgh"), most=8):
        eventually(lambda: tried)
        time.sleep(0.2)
        assert len(tried) <= keeper._MAKERS


def test_what_lives_is_renewed_and_what_has_died_is_replaced(
    home: Path, world: World, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_RENEW_S", 0.05)
    with keeping(home, provider, Queue("a"), most=1):
        eventually(lambda: len(world.deadlines) == 1)
        (first,) = world.alive
        eventually(lambda: world.deadlines[first] > time.time() + ahead.LIFE_S - 0.5)
        before = world.deadlines[first]
        eventually(lambda: world.deadlines[first] > before)
        del world.alive[first]
        eventually(lambda: world.alive)
        assert first not in world.alive


def test_a_keeper_told_to_keep_nothing_does_nothing(home: Path, world: World, provider: FakeProvider) -> None:
    with keeping(home, provider, Queue("a"), most=0):
        time.sleep(0.05)
        assert provider.created == []
        assert not wire.address(home).exists()


def test_one_process_of_a_host_does_the_work_and_another_one_after_it(
    home: Path, world: World, provider: FakeProvider
) -> None:
    with keeping(home, provider, Queue("a"), most=1) as first:
        eventually(lambda: len(world.alive) == 1)
        with keeping(home, provider, Queue("a"), most=1):
            time.sleep(0.1)
            assert world.most_alive == 1
            (before,) = world.alive
            first.set()
            eventually(lambda: world.alive and before not in world.alive)
            soon_taken(home, provider, "a")


# --- Changing hands -------------------------------------------------------------------------------------------------


def test_without_a_keeper_there_is_none_also_behind_the_file_of_one_that_was_killed(
    home: Path, world: World, provider: FakeProvider
) -> None:
    assert take(home, provider, "a") is None
    wire.address(home).parent.mkdir(parents=True)
    with wire.new_socket() as stale:
        stale.bind(str(wire.address(home)))
    assert take(home, provider, "a") is None
    with keeping(home, provider, Queue("a"), most=1):
        eventually(lambda: world.deadlines)
        assert wire.address(home).stat().st_mode & 0o777 == 0o600
        soon_taken(home, provider, "a")


def test_the_folder_may_have_a_longer_name_than_a_socket(world: World, provider: FakeProvider, tmp_path: Path) -> None:
    home = tmp_path / ("long" * 40)
    with keeping(home, provider, Queue("a"), most=1):
        eventually(lambda: world.deadlines)
        soon_taken(home, provider, "a")


def test_each_is_handed_out_once_however_many_ask(home: Path, world: World, provider: FakeProvider) -> None:
    queue = Queue(*"aaaa")
    with keeping(home, provider, queue):
        eventually(lambda: len(world.deadlines) == 4)
        queue.set()
        found: list[FakeEnvironment | None] = []

        def ask() -> bool:
            found.append(take(home, provider, "a"))
            return sum(one is not None for one in found) >= 4

        askers = [threading.Thread(target=eventually, args=(ask,)) for _ in range(8)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        taken = [one.id for one in found if one is not None]
        assert len(taken) == len(set(taken)) >= 4


def test_one_that_has_died_is_passed_over(home: Path, world: World, provider: FakeProvider) -> None:
    with keeping(home, provider, Queue("a", "a"), most=2):
        eventually(lambda: len(world.deadlines) == 2)
        dead = next(iter(world.deadlines))
        del world.alive[dead]
        taken = soon_taken(home, provider, "a")
        assert taken.id != dead


def test_what_lives_and_cannot_be_given_away_is_not_made_again_and_again(
    home: Path, world: World, provider: FakeProvider
) -> None:
    with keeping(home, provider, Queue("a", "a"), most=1):
        eventually(lambda: world.deadlines)
        for one in provider.made.values():
            one.stays = True
        assert take(home, provider, "a") is None
        time.sleep(0.15)
        assert (len(provider.created), world.alive) == (1, {})


def test_a_queue_that_has_changed_is_looked_at_soon(
    home: Path, world: World, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_LOOK_S", 60.0)
    queue, stop, looks = Queue("a"), threading.Event(), []

    def counted() -> Sequence[Wish]:
        looks.append(time.monotonic())
        return queue()

    kept = Keeper(home, "test", queue=counted, provide=lambda kind: provider, most=2)
    kept.wake()
    thread = threading.Thread(target=kept.run, args=(stop,))
    thread.start()
    eventually(lambda: images(world, provider) == ["a"])
    queue.set("a", "b")
    for _ in range(50):
        kept.wake()
    eventually(lambda: images(world, provider) == ["a", "b"])
    assert len(looks) == 2
    assert looks[1] - looks[0] >= keeper._REST_S
    stop.set()
    thread.join(30)
    assert world.alive == {}


def test_a_taker_that_dies_on_the_way_leaves_nothing(home: Path, world: World, provider: FakeProvider) -> None:
    spec = EnvironmentSpec(image="a")
    with keeping(home, provider, Queue("a"), most=1):
        eventually(lambda: world.deadlines)
        (first,) = world.alive
        with wire.new_socket() as connection:
            connection.connect(str(wire.address(home)))
            connection.sendall(Key.of(spec, "id-of-a").digest().encode())
            ticket = wire.receive_ticket(connection)
            assert ticket is not None
            wire.close_all(ticket.descriptors)
        eventually(lambda: first not in world.alive)


def test_one_that_the_taker_cannot_use_is_ended_and_the_taker_makes_its_own(
    home: Path, world: World, provider: FakeProvider
) -> None:
    queue = Queue("a")
    with keeping(home, provider, queue, most=1):
        eventually(lambda: world.deadlines)
        (first,) = world.alive
        taker = FakeProvider(world)
        taker.refuses_to_take = True
        assert take(home, taker, "a") is None
        eventually(lambda: first not in world.alive)


def test_no_open_file_is_left_by_the_change_of_hands(home: Path, world: World, provider: FakeProvider) -> None:
    with keeping(home, provider, Queue("a"), most=1):
        eventually(lambda: world.deadlines)
        before = _files()
        for _ in range(5):
            soon_taken(home, provider, "a")
        eventually(lambda: _files() <= before + 1)  # an answer may be on its way


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_keeper_that_says_nothing_is_not_waited_for(
    home: Path, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.environments.warm.asking._PATIENCE_S", 0.05)
    wire.address(home).parent.mkdir(parents=True)
    with wire.new_socket() as silent:
        silent.bind(str(wire.address(home)))
        silent.listen()
        found: list[object] = []
        asker = threading.Thread(target=lambda: found.append(take(home, provider, "a")), daemon=True)
        asker.start()
        asker.join(10)
        assert found == [None]


def test_nobody_at_the_door_can_stop_it(home: Path, world: World, provider: FakeProvider) -> None:
    with keeping(home, provider, Queue("a"), most=1):
        eventually(lambda: world.deadlines)
        for noise in (b"\xff\xfe", b"x" * 5000, b""):
            with wire.new_socket() as connection:
                connection.connect(str(wire.address(home)))
                if noise:
                    connection.sendall(noise)
        soon_taken(home, provider, "a")


def test_what_changed_while_it_was_made_does_not_outlive_its_keeper(home: Path, world: World) -> None:
    slow = FakeProvider(world, takes_s=0.3)
    with keeping(home, slow, Queue("a"), most=1):
        eventually(lambda: world.alive)
    eventually(lambda: not world.alive)


# --- What is the same, and who goes first ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"setup": ("make",)},
        {"tools": ("an-agent",)},
        {"env": {"A": "b"}},
        {"workdir": "/elsewhere"},
        {"network": Network.OPEN},
        {"network": Network.ALLOWLIST, "allowed_hosts": ("example.org",)},
        {"resources": Resources(cpus=1.0)},
        {"kind": EnvironmentKind.OCI},
        {"reuse": Reuse.SHARED_READONLY},
    ],
    ids=lambda change: "-".join(change),
)
def test_whatever_a_command_could_tell_makes_another_key(change: dict[str, object]) -> None:
    spec = EnvironmentSpec(image="a", env={"X": "1", "Y": "2"})
    key, other = Key.of(spec, "i"), Key.of(spec.model_copy(update=change), "i")
    assert key != other
    assert key.digest() != other.digest()


def test_what_no_command_could_tell_makes_none() -> None:
    one = EnvironmentSpec(image="a:1", env={"X": "1", "Y": "2"}, reuse=Reuse.FRESH)
    same = EnvironmentSpec(image="a:latest", env={"Y": "2", "X": "1"}, reuse=Reuse.RECYCLED)
    assert Key.of(one, "i") == Key.of(same, "i")
    assert Key.of(one, "i").digest() == Key.of(same, "i").digest()
    assert Key.of(one, "i").digest() != Key.of(one, "j").digest()


def test_several_containers_and_folders_are_never_ready(home: Path, world: World, provider: FakeProvider) -> None:
    queue = Queue()
    compose = Compose(context=Bundle(sha256="0" * 64, size_bytes=1))
    queue.specs = [EnvironmentSpec(compose=compose), EnvironmentSpec(image="a", kind=EnvironmentKind.LOCAL)]
    with keeping(home, provider, queue):
        time.sleep(0.1)
        assert provider.created == []


def test_what_is_made_ahead_takes_only_what_is_free_and_fetches_no_image(home: Path) -> None:
    gate = AheadGate(HostGate(home))
    with gate.hold("environment_starts:here", 1, timeout_s=5):
        begun = time.monotonic()
        with pytest.raises(TimeoutError), gate.hold("environment_starts:here", 1, timeout_s=5):
            pass
        assert time.monotonic() - begun < 4
    for limit in ("image_pulls:registry", "image_builds:here"):
        with pytest.raises(TimeoutError, match=limit), gate.hold(limit, None, timeout_s=5):
            pass


@pytest.mark.parametrize(
    "message", ['{"kind": 1', '["kind"]', '{"kind": "oci"}', '{"kind": "oci", "body": 1}', '"oci"', "7"]
)
def test_a_message_that_is_no_ticket_is_refused_and_its_files_are_closed(message: str) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        file = os.open("/dev/null", os.O_RDONLY)
        before = _files()
        socket.send_fds(there, [message.encode()], [file])
        with pytest.raises(ValueError, match=r"delimiter|another version"):
            wire.receive_ticket(here)
        assert _files() == before
        os.close(file)
