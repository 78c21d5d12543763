"""Models the subset of the Compose Specification that a task may use. Unknown keys are refused.

The models are validated with a `FileContext`. docs/howto/compose.md lists the keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationInfo, model_validator

from app.compose_file.build_context import adapted
from app.compose_file.mounts import ServiceMount, mount_of, tmpfs_of
from app.compose_file.refusals import FileContext, refused
from app.compose_file.values import (
    Count,
    Flag,
    Number,
    Seconds,
    Size,
    Text,
    Texts,
    Words,
    count,
    pairs,
    plain,
    text,
    texts,
)
from app.errors import SpecInvalid
from app.task_files import read_text_inside

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_MAX_CHECK_S = 3600.0
_SAFE_OPTIONS = ("no-new-privileges", "no-new-privileges:true", "no-new-privileges=true")


class Condition(StrEnum):
    """Condition that a service waits for in another."""

    STARTED = "service_started"
    HEALTHY = "service_healthy"
    COMPLETED = "service_completed_successfully"


class _ComposeSection(BaseModel):
    """A map of the file. `section`: its name in the tables of refusals; `at`: its place below `FileContext.where`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    section: ClassVar[str] = ""
    at: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _without_listed(cls, body: Any, info: ValidationInfo) -> Any:
        """Removes the keys that the tables list, and known keys without a value."""
        if not isinstance(body, dict | None):
            return body
        if info.context is not None and body:
            body = FileContext.of(info).refuse_listed(cls.section, body, cls.at)
        return {key: value for key, value in (body or {}).items() if value is not None or key not in cls.model_fields}


def _build_folder(context: str | None, info: ValidationInfo) -> str:
    if info.context is None:
        return context or "."
    folder = (info.context.folder / (context or ".")).resolve()
    if "://" in (context or "") or not folder.is_relative_to(info.context.folder) or not folder.is_dir():
        raise refused("a folder of the context", context, "copy it there")
    return str(folder.relative_to(info.context.folder))


def _dockerfile(name: str | None, info: ValidationInfo) -> str:
    name = name or "Dockerfile"
    if info.context is not None and "context" in info.data:
        folder = info.context.folder / info.data["context"]
        if not (folder / name).resolve().is_relative_to(folder) or not (folder / name).is_file():
            raise refused("a file in the build's folder", name)
    return name


def _arguments(value: Any) -> dict[str, str]:
    args = {key: one for key, one in sorted(pairs(value).items()) if one is not None}
    for key, one in args.items():
        if one and ("\n" in one or not _VARIABLE.fullmatch(key)):
            raise refused("a name and a value of one line", f"{key}={one}")
    return args


class ServiceBuild(_ComposeSection):
    """An image to build: a folder of the bundle, with arguments and a target stage."""

    section = "build"
    at = "build"

    context: Annotated[str, AfterValidator(_build_folder), BeforeValidator(text)] = "."  # relative to the bundle's root
    dockerfile: Annotated[str, AfterValidator(_dockerfile), BeforeValidator(text)] = (
        "Dockerfile"  # relative to the context
    )
    args: Annotated[dict[str, str], BeforeValidator(_arguments)] = {}
    target: Text = None

    @model_validator(mode="before")
    @classmethod
    def _in_short(cls, body: Any) -> Any:
        return {"context": body} if isinstance(body, str) else body

    @model_validator(mode="after")
    def _stage_is_there(self, info: ValidationInfo) -> ServiceBuild:
        if info.context is not None and self.target is not None:
            try:
                self.adapted_dockerfile(info.context.folder)
            except SpecInvalid as error:
                FileContext.of(info).refuse("build.target", "a stage of the Dockerfile", f"{self.target}: {error}")
        return self

    def adapted_dockerfile(self, folder: Path) -> str:
        """Returns the Dockerfile with these arguments, without later stages. Raises: SpecInvalid: no such stage."""
        path = folder / self.context / self.dockerfile
        return adapted(read_text_inside(folder, path, errors="replace"), self.args, self.target)


def _variables(value: Any, info: ValidationInfo) -> dict[str, str | None]:
    variables = pairs(value)
    for key, one in variables.items():
        if not _VARIABLE.fullmatch(key):
            raise refused("names of variables", key)
        if one is None:
            FileContext.of(info).note(f"{info.field_name}.{key}", "left out: it would be taken from the host")
    return variables


def _env_files(value: Any, info: ValidationInfo) -> dict[str, str | None]:
    variables: dict[str, str | None] = {}
    for one in value if isinstance(value, list) else [value]:
        variables |= _variables(_env_file(one, FileContext.of(info).folder), info)
    return variables


def _env_file(value: Any, folder: Path) -> dict[str, str | None]:
    given = value if isinstance(value, dict) else {"path": value}
    [name] = texts(given.get("path")) or ("",)
    file = (folder / name).resolve()
    if not file.is_relative_to(folder) or not file.is_file():
        if given.get("required", True) or not file.is_relative_to(folder):
            raise refused("a file of the context", name)
        return {}
    variables: dict[str, str | None] = {}
    for line in read_text_inside(folder, file, errors="replace").splitlines():
        if line.strip() and not line.strip().startswith("#"):
            key, equals, one = line.strip().removeprefix("export ").partition("=")
            variables[key.strip()] = _unquoted(one.strip()) if equals else None
    return variables


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value


def _condition(value: Any) -> Condition:
    if str(value) not in set(Condition):
        raise refused(f"a condition of {', '.join(Condition)}", value)
    return Condition(str(value))


class Dependency(_ComposeSection):
    """Dependency of a service on another one."""

    condition: Annotated[Condition, BeforeValidator(_condition)] = Condition.STARTED
    restart: Any = None
    required: Any = None


def _test(value: Any) -> tuple[str, ...]:
    words = ("CMD-SHELL", value) if isinstance(value, str) else texts(value)
    if words[:1] == ("NONE",) or not words:
        return words[:1]
    if words[0] not in ("CMD", "CMD-SHELL") or len(words) < 2:
        raise refused("CMD with words, CMD-SHELL with a command, or NONE", value)
    return words


_CheckSeconds = Annotated[Seconds, AfterValidator(lambda value: min(value, _MAX_CHECK_S) or 30.0)]


class HealthCheck(_ComposeSection):
    """Test of a service's health; times in seconds. `test` begins with CMD or CMD-SHELL; empty: the image's test."""

    test: Annotated[tuple[str, ...], BeforeValidator(_test)] = ()
    disable: Flag = False
    interval: _CheckSeconds = 30.0
    timeout: _CheckSeconds = 30.0
    start_period: Seconds = 0.0
    start_interval: Any = None
    retries: Annotated[int, BeforeValidator(lambda value: count(value) or 3)] = 3

    @property
    def disabled(self) -> bool:
        return self.disable or self.test == ("NONE",)


def _networks(value: Any, info: ValidationInfo) -> Any:
    named = dict.fromkeys(map(str, value)) if isinstance(value, list) else value
    if not isinstance(named, dict) or info.context is None:
        return named
    for network in named.keys() - info.context.networks - {"default"}:
        FileContext.of(info).refuse(f"networks.{network}", "a network that the file's `networks` name", network)
    return named or {"default": None}


class Membership(_ComposeSection):
    """Membership of a service in one network, with its further names there."""

    aliases: Texts = ()
    priority: Any = None


def _hosts(value: Any) -> dict[str, str]:
    if isinstance(value, list):
        split = [re.split(r"[:=]", plain(one), maxsplit=1) for one in value]
        value = {parts[0]: parts[1] if len(parts) > 1 else "" for parts in split}
    hosts = {name: plain(address) for name, address in (value if isinstance(value, dict) else {"": value}).items()}
    for name, address in hosts.items():
        try:
            ip_address(address.strip("[]"))
        except ValueError:
            entry = f"{name}:{address}"
            raise refused("a name and an address", entry, "the host is not reached from a task") from None
    return hosts


def _ports(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    """Reads the ports. None is published: only other services on the same networks reach them."""
    if not isinstance(value, list):
        raise refused("a list", value)
    ports = [plain(one.get("target", "")) if isinstance(one, dict) else plain(one).rpartition(":")[2] for one in value]
    for port in ports:
        FileContext.of(info).note("ports", f"{port} is reached by name on its network, not on the host")
    return tuple(ports)


def _only(expected: str, allowed: tuple[object, ...], advice: str = "leave it out") -> AfterValidator:
    def check(value: Any) -> Any:
        if value not in allowed:
            raise refused(expected, value, advice)
        return value

    return AfterValidator(check)


def _no_devices(value: Any) -> None:
    if value:
        raise refused("no devices of the host", value, "let the service do without it")


_Single = Annotated[Any, _only("one container of a service", (None, 1, "1"), "")]


class ResourceLimits(_ComposeSection):
    model_config = ConfigDict(extra="ignore")
    devices: Annotated[None, BeforeValidator(_no_devices)] = None
    cpus: Number = None
    memory: Size = None
    pids: Count = None


class DeployResources(_ComposeSection):
    model_config = ConfigDict(extra="ignore")
    limits: ResourceLimits = ResourceLimits()
    reservations: ResourceLimits = ResourceLimits()


class Deploy(_ComposeSection):
    model_config = ConfigDict(extra="ignore")
    replicas: _Single = None
    resources: DeployResources = DeployResources()


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Upper bounds that the file sets; None: those of the task."""

    cpus: float | None = None
    memory_bytes: int | None = None
    pids: int | None = None


def _pids(value: Any) -> Any:
    return None if value in (-1, "-1") else value


def _security(options: tuple[str, ...]) -> tuple[str, ...]:
    for option in options:
        if option not in _SAFE_OPTIONS:
            raise refused("no-new-privileges, or nothing", option, "let the service do without it")
    return options


def _depends_on(value: Any) -> Any:
    return dict.fromkeys(texts(value)) if isinstance(value, list) else value


_NETWORK_OF_FILE = "name a network of the file under `networks`"


class Service(_ComposeSection):
    """A container of the project. Values that are None are the image's or the task's."""

    section = "service"

    name: str
    image: Text = None
    build: ServiceBuild | None = None
    command: Words = None
    entrypoint: Words = None
    environment: Annotated[dict[str, str | None], BeforeValidator(_variables)] = {}
    env_file: Annotated[dict[str, str | None], BeforeValidator(_env_files)] = {}
    working_dir: Text = None
    user: Text = None
    hostname: Text = None
    depends_on: Annotated[dict[str, Dependency], BeforeValidator(_depends_on)] = {}
    healthcheck: HealthCheck | None = None
    volumes: tuple[Annotated[ServiceMount, BeforeValidator(mount_of)], ...] = ()
    tmpfs: Annotated[
        tuple[Annotated[ServiceMount, BeforeValidator(tmpfs_of)], ...],
        BeforeValidator(lambda value: value if isinstance(value, list) else [value]),
    ] = ()
    network_mode: Annotated[Any, _only("none, or nothing", (None, "none"), _NETWORK_OF_FILE)] = None
    networks: Annotated[dict[str, Membership], BeforeValidator(_networks)] = {"default": Membership()}
    extra_hosts: Annotated[dict[str, str], BeforeValidator(_hosts)] = {}
    expose: Texts = ()
    ports: Annotated[tuple[str, ...], BeforeValidator(_ports)] = ()
    mem_limit: Size = None
    cpus: Number = None
    pids_limit: Annotated[Count, BeforeValidator(_pids)] = None
    deploy: Deploy = Deploy()
    scale: _Single = None
    shm_size: Size = None
    cap_drop: Annotated[Texts, AfterValidator(lambda names: tuple(one.upper() for one in names))] = ()
    ipc: Annotated[Any, _only("private, or nothing", (None, "", "private", "none"))] = None
    security_opt: Annotated[Texts, AfterValidator(_security)] = ()
    init: Flag = False
    profiles: Texts = ()

    @property
    def variables(self) -> dict[str, str]:
        """Variables of the env files, overridden by the service's own."""
        merged = {**self.env_file, **self.environment}
        return {key: value for key, value in merged.items() if value is not None}

    @property
    def mounts(self) -> tuple[ServiceMount, ...]:
        return (*self.volumes, *self.tmpfs)

    @property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        """Networks of the service, and its further names on each."""
        return {} if self.network_mode == "none" else {name: one.aliases for name, one in self.networks.items()}

    @property
    def limits(self) -> ServiceLimits:
        """The tighter limits of the two places that set them: the service itself and `deploy`."""
        limits = self.deploy.resources.limits
        return ServiceLimits(
            min(filter(None, (self.cpus, limits.cpus)), default=None),
            min(filter(None, (self.mem_limit, limits.memory)), default=None),
            min(filter(None, (self.pids_limit, limits.pids)), default=None),
        )


class DeclaredNetwork(_ComposeSection):
    section = "network"

    name: Any = None
    labels: Any = None
    driver: Annotated[Any, _only("bridge", (None, "", "default", "bridge"))] = None
    internal: Flag = False
    attachable: Any = None
    enable_ipv4: Any = None
    enable_ipv6: Any = None


class DeclaredVolume(_ComposeSection):
    section = "volume"

    name: Any = None
    labels: Any = None
    driver: Annotated[Any, _only("local", (None, "", "default", "local"))] = None


class ComposeFile(_ComposeSection):
    """The top level of a file. The sections below it are validated separately."""

    section = "file"

    name: Any = None
    version: Any = None
    services: dict[str, Any] = {}
    networks: dict[str, Any] = {}
    volumes: dict[str, Any] = {}
