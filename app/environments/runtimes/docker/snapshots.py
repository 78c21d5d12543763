"""Snapshots of containers: images labelled with their owner and expiry.

An engine commits what a container wrote as one more layer; nothing is copied when an environment is made from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from docker.errors import APIError, NotFound

from app.environments.contract import Snapshot, Tags
from app.errors import EnvironmentFailed
from app.host.engine import ROLE, Engine

BASE = "megaflow.setup.base"
"""Label of an image made of a container: the id of the task's image that the container stood on."""
_LABEL = "megaflow.snapshot"
"""Label of a snapshot: the labels of its owner, as JSON. As labels they would be its containers', too."""
_REPOSITORY = "megaflow/snapshot"
_OWNERS = ("instance", "run", "task", "attempt", "deadline")
"""Labels of the container, which an image would give to all that stand on it."""


def commit(
    engine: Engine, container_id: str, image_id: str, name: str, labels: Mapping[str, str], **config: Any
) -> str:
    """Make what a container's files are an image, and return its id. What runs in it waits meanwhile.

    image_id: what the container stands on as the task names it. name: `repository:tag`. config: what the image is to
    say besides; the rest is the container's.

    Raises: APIError.
    """
    repository, _, tag = name.rpartition(":")
    blank = dict.fromkeys((ROLE, *(f"megaflow.{owner}" for owner in _OWNERS)), "")
    conf = {"Labels": {**blank, BASE: image_id, **labels}, "User": engine.user_of(image_id) or "0", **config}
    return str(engine.api.commit(container_id, repository=repository, tag=tag, conf=conf)["Id"])


def refuse_more_than_files(volumes: Sequence[str], tools: Sequence[str]) -> None:
    """volumes: what is mounted where. tools: where some were copied in. Raises: EnvironmentFailed: there are any."""
    if volumes:
        raise EnvironmentFailed(
            f"expected files of its own alone, found a volume at {', '.join(volumes)}: what is in it would be lacking."
        )
    if tools:
        raise EnvironmentFailed(
            f"expected tools that are mounted, found copies of them at {', '.join(tools)}: they would be in all that is"
            " made from it. Take an engine that sees this host's files, or an environment without tools."
        )


def take(engine: Engine, container_id: str, image_id: str, tags: Tags) -> Snapshot:
    """Keep a container's files. Raises: EnvironmentFailed, EngineUnavailable, DiskFull."""
    found = Snapshot("docker", uuid4().hex, image_id)
    labels = {
        "megaflow": tags.installation,
        "megaflow.image": "snapshot",
        _LABEL: json.dumps(tags.labels(), sort_keys=True),
    }
    with engine.named(f"keep a snapshot of environment {container_id[:12]}", EnvironmentFailed):
        variables = _forgotten(engine, container_id, image_id)
        commit(engine, container_id, image_id, _name(found.id), labels, Env=variables)
    return found


def _forgotten(engine: Engine, container_id: str, image_id: str) -> list[str]:
    """The variables of the image alone. A name without a value takes one away, as the engine's interface has it."""
    config = engine.api.inspect_image(image_id).get("Config") or {}  # type: ignore[no-untyped-call]
    own = {str(entry).partition("=")[0]: str(entry) for entry in config.get("Env") or ()}
    told = engine.api.inspect_container(container_id)["Config"]["Env"] or ()
    return [*own.values(), *sorted({str(entry).partition("=")[0] for entry in told} - own.keys())]


def find(engine: Engine, snapshot: Snapshot) -> str:
    """The image to stand on. Raises: EnvironmentFailed: it is gone, or none of an engine's; EngineUnavailable."""
    if snapshot.kind != "docker":
        raise EnvironmentFailed(f"expected a snapshot of the kind 'docker', found {snapshot.kind!r}.")
    with engine.named(f"look for snapshot {snapshot.id}", EnvironmentFailed):
        found = engine.api.images(name=_name(snapshot.id))
    if not found:
        raise EnvironmentFailed(f"snapshot {snapshot.id} is gone: it was removed, or its deadline has passed.")
    return str(found[0]["Id"])


def remove(engine: Engine, snapshot: Snapshot) -> None:
    """Take its name; what a running container stands on goes by `EngineSnapshot.remove` later.

    Raises: EnvironmentFailed, EngineUnavailable.
    """
    with engine.named(f"remove snapshot {snapshot.id}", EnvironmentFailed):
        try:
            engine.api.remove_image(_name(snapshot.id), force=True)
        except NotFound:
            return


# --- For who cleans up ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """A snapshot on an engine. `id`: empty when its owner has removed it and something stands on it yet."""

    id: str
    image_id: str
    labels: dict[str, str]
    made_unix_s: float

    def remove(self, engine: Engine) -> None:
        """What a running container stands on loses its name, and goes at another call.

        Raises: what the engine's client does.
        """
        try:
            if self.id:
                engine.api.remove_image(_name(self.id), force=True)
            else:
                engine.api.remove_image(self.image_id)
        except NotFound:
            return
        except APIError as error:
            if error.status_code != 409:
                raise


def listed(engine: Engine, installation: str) -> Iterator[EngineSnapshot]:
    """All of an installation. Raises: what the engine's client does."""
    for one in engine.api.images(filters={"label": [f"megaflow={installation}", _LABEL]}):
        names = [name for name in one.get("RepoTags") or () if "<none>" not in name]
        if any(not name.startswith(_name("")) for name in names):
            continue  # a person's: of a container that stood on one, and so had its label
        identity = names[0].removeprefix(_name("")) if names else ""
        yield EngineSnapshot(identity, str(one["Id"]), json.loads(one["Labels"][_LABEL]), float(one["Created"]))


def sweep(engine: Engine, installation: str, keep: Mapping[str, bool]) -> list[str]:
    """Remove all of an installation but what is kept; their ids. Raises: what the engine's client does."""
    doomed = [one for one in listed(engine, installation) if not keep.get(one.id, False)]
    for one in doomed:
        one.remove(engine)
    return [one.id for one in doomed if one.id]


def _name(identity: str) -> str:
    return f"{_REPOSITORY}:{identity}"
