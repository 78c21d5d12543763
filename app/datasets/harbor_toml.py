"""Reads task.toml of the Harbor format into models; what we cannot honour yet is refused, not passed over."""

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
"""Of our own keys, those that [environment] has a word for."""
_SIZE = r"(?i)^\d{1,12}(\.\d{1,6})?[KMG]$"


class _Section(BaseModel):
    model_config = ConfigDict(extra="allow")


class TaskEnvironment(_Section):
    """[environment]; the defaults are Harbor's own."""

    build_timeout_sec: float = Field(default=600.0, gt=0, strict=True)
    docker_image: str | None = None
    cpus: float = Field(default=1.0, gt=0, strict=True)
    memory_mb: int | None = Field(default=None, strict=True)
    memory: str | None = Field(default=None, pattern=_SIZE)  # an older way to say it
    storage_mb: int | None = Field(default=None, gt=0, strict=True)
    storage: str | None = Field(default=None, pattern=_SIZE)  # as with memory
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
    """What a verifier apart gets of the agent's environment; `destination` says where Harbor keeps it for people."""

    model_config = ConfigDict(extra="forbid")
    source: str
    destination: str | None = None


class _Verifier(_Timed):
    environment_mode: Literal["shared", "separate"] | None = None
    environment: TaskEnvironment | None = None
    service: str | tuple[str, ...] | None = None  # ours: where the tests run, of several containers


class TaskToml(_Section):
    environment: TaskEnvironment = TaskEnvironment()
    agent: _Timed = _Timed()
    verifier: _Verifier = _Verifier()
    solution: _Timed = _Timed()
    artifacts: tuple[str | _Artifact, ...] = ()
    megaflow: Policies = Policies()


# Keys that change nothing of what a task means here: how strictly a cluster reserves what is asked for.
_HARMLESS = {"environment": ("cpu_mode", "memory_mode", "storage_mode")}
_TOP = frozenset(
    {
        *TaskToml.model_fields, "metadata", "multi_step_reward_strategy", "schema_version", "source",
        "steps", "task", "version",
    }
)  # fmt: skip
"""Keys and tables at the top of the file; another one is named in the log."""
# What would change the task's meaning if it were passed over.
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
    """The task's own file, checked. strict: unknown keys at its top are refused, too.

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
    ours = policies_of(raw.pop(KEY, None), place, without=_SAID_BY_HARBOR)
    return TaskToml.model_validate({**raw, KEY: ours})


def _refuse_what_we_cannot(raw: dict[str, Any], place: FaultPlace) -> None:
    if raw.get("steps"):
        raise place.fault("steps", "a task of one step; several come later", raw["steps"])
    for section, keys in _NOT_YET.items():
        found = raw.get(section)
        asked = found if isinstance(found, dict) else {}  # else the model says what is wrong with it
        for key in keys:
            if asked.get(key):
                raise place.fault(f"{section}.{key}", "nothing here, as we cannot honour it yet", asked[key])
    for section, model in _SECTIONS.items():
        found = raw.get(section)
        known = {*model.model_fields, *_NOT_YET.get(section, ()), *_HARMLESS.get(section, ())}
        for key in found if isinstance(found, dict) else ():
            if key not in known:
                expected = f"one of {', '.join(sorted(known))}"
                raise place.fault(f"{section}.{key}", expected, raw[section][key], "remove it")
