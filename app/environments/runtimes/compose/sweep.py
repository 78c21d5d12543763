"""What the containers of a project shared and their worker did not remove: networks and volumes, by their labels.

The containers themselves are swept as every environment's; whatever goes last takes the control group with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from docker.errors import APIError, NotFound

from app.environments.runtimes.compose import project_cgroup
from app.environments.runtimes.compose.resources import PROJECT
from app.errors import EnvironmentFailed
from app.host.engine import ROLE, Engine


def remove_container(engine: Engine, container_id: str, labels: Mapping[str, str]) -> None:
    """Any environment's; the last of a project takes the control group with it.

    Raises: what `Engine.remove` does.
    """
    engine.remove(container_id)
    if (project := labels.get(PROJECT)) is not None:
        project_cgroup.remove(project, timeout_s=0.0)


@dataclass(frozen=True, slots=True)
class Shared:
    """A network or a volume of a project."""

    kind: Literal["network", "volume"]
    id: str
    labels: dict[str, str]
    created: str  # as the engine writes it

    @property
    def project(self) -> str:
        return self.labels[PROJECT]

    @property
    def deadline_unix_s(self) -> float:
        return float(self.labels["megaflow.deadline"])

    def remove(self, engine: Engine) -> bool:
        """With its project's control group. False when there is a container yet: it lives, or goes first. Stopped, too.

        A project that was recycled has the labels of its first attempt, whose deadline may have passed.

        Raises: InUse: by somebody else's container; what the engine's client does.
        """
        if engine.api.containers(all=True, filters={"label": f"{PROJECT}={self.project}"}):
            return False
        project_cgroup.remove(self.project)
        remove = engine.api.remove_network if self.kind == "network" else engine.api.remove_volume
        try:
            remove(self.id)
        except NotFound:
            return True
        except APIError as error:
            if error.status_code in (403, 409):
                raise InUse(
                    f"{self.kind} {self.id[:12]} is in use, and not by its project: {error.explanation}"
                ) from error
            raise
        return True


class InUse(EnvironmentFailed):
    """What a project shared is used by a container of somebody else."""


def shared(engine: Engine, installation: str) -> list[Shared]:
    """All that stands, whoever's it is. Raises: what the engine's client does."""
    ours = {"label": [f"megaflow={installation}", f"{ROLE}=environment", PROJECT]}
    networks, volumes = engine.api.networks(filters=ours), engine.api.volumes(filters=ours)["Volumes"] or ()
    return [
        *(Shared("network", str(one["Id"]), one["Labels"] or {}, str(one["Created"])) for one in networks),
        *(Shared("volume", str(one["Name"]), one["Labels"] or {}, str(one["CreatedAt"])) for one in volumes),
    ]
