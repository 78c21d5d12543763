"""Reads task.toml of the Harbor format into models; unsupported features are refused, not ignored."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

import structlog
from pydantic import BaseModel, ConfigDict, Field

from app.datasets.faults import FaultPlace
from app.datasets.policies import KEY, Policies, policies_of
from app.errors import DatasetInvalid
from app.task_files import read_text_inside

log = structlog.get_logger(__name__)


_SAID_BY_HARBOR = ("allowed_hosts", "storage_mb")
"""MegaFlow's keys for which [environment] has its own key."""
_SIZE = r"(?i)^\d{1,12}(\.\d{1,6})?[KMG]$"


class _Section(BaseModel):
    model_config = ConfigDict(extra="allow")


class TaskEnvironment(_Section):
    """Section [environment]; the defaults are Harbor's own."""

    build_timeout_sec: float = Field(default=600.0, gt=0, strict=True)
    docker_image: str | None = None
    cpus: float = Field(default=1.0, gt=0, strict=True)
    memory_mb: int | None = Field(default=None, strict=True)
    memory: str | None = Field(default=None, pattern=_SIZE)  # an older key for it
    storage_mb: int | None = Field(default=None, gt=0, strict=True)
    storage: str | None = Field(default=None, pattern=_SIZE)  # an older key for it
    allow_internet: bool = True
    network_mode: Literal["public", "no-network", "allowlist"] | None = None
    allowed_hosts: tuple[str, ...] = ()
    workdir: str | None = None
    env: dict[str, str] = {}
    gpus: Literal[0] = 0


class _Timed(_Section):
    timeout_sec: float | None = Field(default=None, gt=0, strict=True)
    env: dict[str, str] = {}


class _Artifact(BaseModel):
    """An artifact for a separate verifier, from the agent's environment; Harbor stores it at `destination`."""

    model_config = ConfigDict(extra="forbid")
    source: str
    destination: str | None = None


class _Verifier(_Timed):
    environment_mode: Literal["shared", "separate"] | None = None
    environment: TaskEnvironment | None = None
    service: str | tuple[str, ...] | None = None  # our key: the service that runs the tests, of several containers


class TaskToml(_Section):
    environment: TaskEnvironment = TaskEnvironment()
    agent: _Timed = _Timed()
    verifier: _Verifier = _Verifier()
    solution: _Timed = _Timed()
    artifacts: tuple[str | _Artifact, ...] = ()
    megaflow: Policies = Policies()


# Keys that do not change the meaning of a task here: how strictly a cluster reserves resources.
_HARMLESS = {"environment": ("cpu_mode", "memory_mode", "storage_mode")}
_TOP = frozenset(
    {
        *TaskToml.model_fields, "metadata", "multi_step_reward_strategy", "schema_version", "source",
        "steps", "task", "version",
    }
)  # fmt: skip
"""Keys and tables at the top of the file; any other one is logged."""
# Keys that would change the task's meaning if they were ignored.
_NOT_YET: dict[str, tuple[str, ...]] = {
    "environment": ("mcp_servers", "healthcheck", "gpu_types", "skills_dir"),
    "agent": ("user", "network_mode", "allowed_hosts"),
    "verifier": ("user", "network_mode", "allowed_hosts", "collect"),
}
_SECTIONS: dict[str, type[BaseModel]] = {
    "environment": TaskEnvironment,
    "agent": _Timed,
    "verifier": _Verifier,
    "solution": _Timed,
}


def read_config(folder: Path, place: FaultPlace, *, strict: bool = False) -> TaskToml:
    """Reads and checks the task's own file. strict: unknown keys at its top are refused, too.

    Raises: DatasetInvalid: names the key, what was expected and what was found.
    """
    try:
        raw = tomllib.loads(read_text_inside(folder, folder / "task.toml"))
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetInvalid(f"{place.where}: expected TOML; found {error}") from error
    if unknown := sorted(raw.keys() - _TOP):
        if strict:
            raise place.fault(unknown[0], f"one of {', '.join(sorted(_TOP))}", raw[unknown[0]], "remove it")
        log.warning("dataset.unknown_keys", task=place.where, keys=unknown, known=sorted(_TOP))
    _refuse_what_we_cannot(raw, place)
    policies = policies_of(raw.pop(KEY, None), place, without=_SAID_BY_HARBOR)
    return TaskToml.model_validate({**raw, KEY: policies})


def _refuse_what_we_cannot(raw: dict[str, Any], place: FaultPlace) -> None:
    if raw.get("steps"):
        raise place.fault("steps", "a task of one step; several come later", raw["steps"])
    for section, keys in _NOT_YET.items():
        table = raw.get(section)
        settings = table if isinstance(table, dict) else {}  # otherwise the model reports the fault
        for key in keys:
            if settings.get(key):
                raise place.fault(f"{section}.{key}", "nothing here, as we cannot honour it yet", settings[key])
    for section, model in _SECTIONS.items():
        table = raw.get(section)
        known = {*model.model_fields, *_NOT_YET.get(section, ()), *_HARMLESS.get(section, ())}
        for key in table if isinstance(table, dict) else ():
            if key not in known:
                expected = f"one of {', '.join(sorted(known))}"
                raise place.fault(f"{section}.{key}", expected, raw[section][key], "remove it")
