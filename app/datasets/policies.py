"""Reads MegaFlow's own fields in a dataset: set-up, reuse and network of a task's environment.

The keys are the same in every format, below the name `megaflow`. A format that has its own key for one leaves ours out.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.datasets.faults import FaultPlace, expected
from app.models.spec import Network, Reuse, RewardRange

KEY = "megaflow"


class Policies(BaseModel):
    """Fields of a task below `megaflow`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    setup: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    reuse: Reuse = Reuse.RECYCLED
    network: Network | None = None  # None: the format's default
    allowed_hosts: tuple[str, ...] = ()  # imply the network `allowlist`
    storage_mb: int | None = Field(default=None, ge=64)
    reward_range: RewardRange | None = None  # of a task that a script grades

    @property
    def disk_bytes(self) -> int | None:
        return None if self.storage_mb is None else self.storage_mb << 20

    def environment(self) -> dict[str, Any]:
        """Returns keywords for `EnvironmentSpec`; the network only if the task sets one."""
        network = self.network or (Network.ALLOWLIST if self.allowed_hosts else None)
        network_fields = {} if network is None else {"network": network, "allowed_hosts": self.allowed_hosts}
        return {"setup": self.setup, "reuse": self.reuse, **network_fields}


def policies_of(found: object, place: FaultPlace, *, without: Collection[str] = ()) -> Policies:
    """Reads the fields. without: keys that this format has its own way for. Raises: DatasetInvalid: names the key."""
    known = [name for name in Policies.model_fields if name not in without]
    if found is None:
        return Policies()
    if not isinstance(found, dict):
        raise place.fault(KEY, f"a map with any of {', '.join(known)}", found)
    for key in found:
        if key not in known:
            raise place.fault(f"{KEY}.{key}", f"one of {', '.join(known)}", found[key])
    try:
        return Policies.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in (KEY, *first["loc"]))
        raise place.fault(field, expected(first), first["input"]) from error
