"""Lists snapshots on this host and its engine, for the removal of expired ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from app.environments.runtimes.docker import snapshots
from app.environments.runtimes.local import LocalSnapshots
from app.environments.runtimes.oci.provider import remove_snapshot
from app.errors import EngineUnavailable, EnvironmentFailed
from app.host.engine import Engine, engine_of
from app.images.layer_store import ImageStore
from app.settings import Settings


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """A snapshot. `removed`: by its owner, while something stood on it.

    remove: raises EnvironmentFailed, EngineUnavailable, DiskFull; what is in use it leaves for another call.
    """

    id: str
    labels: dict[str, str]
    made_unix_s: float
    removed: bool
    remove: Callable[[], None]

    @property
    def deadline_unix_s(self) -> float:
        return float(self.labels["megaflow.deadline"])


def standing(settings: Settings) -> Iterator[HostSnapshot]:
    """All of this installation. An engine that does not answer has none."""
    home, ours = settings.home.resolve(), settings.installation
    for owned in ImageStore(home).owned():
        if owned.labels["megaflow"] == ours:
            end: Callable[[], None] = partial(remove_snapshot, home, owned.key)
            yield HostSnapshot(owned.key, owned.labels, owned.made_unix_s, owned.removed, end)
    copies = LocalSnapshots(home)
    for copy in copies.all():
        if copy.labels["megaflow"] == ours:
            yield HostSnapshot(copy.id, copy.labels, copy.made_unix_s, False, partial(copies.remove, copy.id))
    try:
        engine = engine_of(settings)
        with engine.named("list snapshots", EnvironmentFailed):
            found = list(snapshots.listed(engine, ours))
    except (EngineUnavailable, EnvironmentFailed):
        return
    for kept in found:
        end = partial(_remove, engine, kept)
        yield HostSnapshot(kept.id or kept.image_id, kept.labels, kept.made_unix_s, not kept.id, end)


def _remove(engine: Engine, kept: snapshots.EngineSnapshot) -> None:
    with engine.named(f"remove snapshot {kept.id or kept.image_id}", EnvironmentFailed):
        kept.remove(engine)
