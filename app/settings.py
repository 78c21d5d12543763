"""Defines all settings, with units and reasons; no other module reads them from the process environment.

Each is set by an environment variable `MEGAFLOW_<NAME>`. A variable with that prefix and no field is refused, to catch
typing errors. Without a URL of a service, the embedded service in `home` is used.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal
from uuid import UUID

from dotenv import dotenv_values
from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from app.errors import SettingsInvalid
from app.provider_settings import ProviderSettings
from app.settings_checks import PREFIX as PREFIX
from app.settings_checks import as_text, explain, is_base, name_of, reached, refuse_unknown

_SCHEMES = {
    "database_url": ("postgresql", "postgres"),
    "broker_url": ("redis", "rediss", "redis+socket", "unix"),
}

_OF_CLIENTS = frozenset({"server", "token"})
"""Settings of clients on other machines; no process of an installation gets them."""

ProviderName = Literal["process", "docker", "slurm", "kubernetes", "ec2", "alibaba", "simulated"]


class Settings(ProviderSettings):
    """Settings of one installation of MegaFlow."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, allow_inf_nan=False)

    # --- Locations ------------------------------------------------------------------------------------------------
    home: Path = Field(default_factory=lambda: Path.home() / ".megaflow")
    """State of this installation: embedded servers, logs, artifacts, agents' environments."""
    database_url: SecretStr | None = None
    """`postgresql://…`; None: the embedded PostgreSQL, on a Unix socket in `home`."""
    installation: str = Field(
        default_factory=lambda known: "default" if known.get("database_url") else name_of(known.get("home", Path("/"))),
        validate_default=True,
        pattern=r"^[a-z0-9][a-z0-9-]{0,40}$",
    )
    """Name of the installation, a label on everything it creates in the engine. Installations of one name remove each
    other's containers. Not set: the name in the file `home`/installation (a copied home needs another name);
    with MEGAFLOW_DATABASE_URL, which several hosts may share: `default`."""
    broker_url: SecretStr | None = None
    """`redis://…`; None: the embedded Redis, on a Unix socket in `home`."""
    artifacts_url: str | None = None
    """`s3://bucket/prefix` or `file:///folder`; None: `home`/artifacts."""
    s3_endpoint_url: str | None = None
    """URL of an S3-compatible server; None: AWS. Credentials come from boto3's own chain."""
    artifact_links_bytes: int = Field(default=0, ge=0)
    """Browsers fetch artifacts larger than this directly from the store, by links that expire after five minutes; 0:
    never. Needs a store that can sign URLs, at an address that browsers reach."""
    docker_url: str | None = None
    """`unix://…` or `tcp://…`; None: DOCKER_HOST, else the default socket."""
    container_runtime: Literal["auto", "docker"] = "auto"
    """Creator of containers. `docker`: always an engine. `auto`: the host itself if it can and the task wants no
    network, which takes a tenth of the time; otherwise an engine."""
    image_mirror: str | None = None
    """Registry (host[:port]/prefix) tried first for every image reference."""
    registry_auth: SecretStr | None = None
    """Registry logins besides those of `docker login`, as JSON: `{"registry.example:5000": "USER:PASSWORD", …}`."""
    open_network_filter: bool = True
    """Tasks with the network `open` start only when packet rules block the engine's host, link-local and private
    addresses. False: no such rules are requested."""
    open_network_allow: Annotated[tuple[str, ...], NoDecode] = ()
    """Private addresses that these tasks may reach nevertheless: ADDRESS[/BITS][:PORT] (IPv4), separated by commas."""
    base_image: str = "megaflow/base:bookworm"
    """Base image of task recipes that take the argument BASE_IMAGE."""

    # --- Instances, environments and images -----------------------------------------------------------------------
    ephemeral_provider: ProviderName = "process"
    persistent_provider: ProviderName = "process"
    ephemeral_capacity: int = Field(default=0, ge=0)
    """Maximum number of ephemeral instances; 0: by this host's memory (`instance_memory_bytes` each), at most 25 per
    core (agents mostly wait for their model) and 64 in all."""
    instance_memory_bytes: int = Field(default=384 << 20, gt=0)
    """Memory of one attempt on the host: a worker, an agent framework, a small container."""
    persistent_instances: int = Field(default=1, ge=0)
    """Standing instances of the pool; `megaflow classes set standard --pool-min … --pool-max …` makes it elastic."""
    persistent_slots: int = Field(default=4, ge=1)
    """Maximum simultaneous attempts on one standing instance."""
    host_cpu_most: float = Field(default=0.6, ge=0, le=1)
    """Limit on a host's CPU pressure: the share of time in which some process waits for a CPU. Above it, standing
    instances take fewer attempts, down to two per core (four at least). With less than a tenth of its memory
    available, down to one. 0: the host's pressure is ignored."""
    pool_rest_s: float = Field(default=60.0, ge=0)
    """Tasks of mode `auto` avoid a persistent pool while most attempts that ended there within this time, of at least
    three tasks, failed for reasons of the infrastructure. 0: they never avoid it."""
    grading_instances: int = Field(default=0, ge=0)
    """Maximum graders per resource class, started when an attempt runs that is graded in a separate environment; 0: one
    for every two processors of this host."""
    grading_slots: int = Field(default=4, ge=1)
    """Maximum simultaneous gradings on one grader; `ephemeral_capacity` reserves the memory for them."""
    pool_cooldown_s: float = Field(default=60.0, ge=0)
    """A pool with more standing instances than needed for this long drains the least busy one."""
    quarantine_after: int = Field(default=3, ge=1)
    """Quarantine an instance after this many consecutive infrastructure failures."""
    orphan_s: float = Field(default=180.0, gt=0)
    """Time without reaching the ledger after which an instance ends itself."""
    ephemeral_lifetime_s: float = Field(default=6 * 3600.0, gt=0)
    """Maximum lifetime of an ephemeral instance; then it is ended from outside, whatever it does."""
    ephemeral_idle_s: float = Field(default=30.0, gt=0)
    """Time without work after which an ephemeral worker exits."""
    drain_s: float = Field(default=2.0, ge=0)
    """Time that a worker has after a stop signal to finish its attempts; it gives back the others."""
    boot_timeout_s: float = Field(default=60.0, gt=0)
    """Time within which an instance must be ready; otherwise it has failed."""
    task_cpus: float = Field(default=2.0, gt=0, le=256)
    """Processors guaranteed to a task whose dataset states none; it may use three times as many."""
    task_memory_bytes: int = Field(default=2 << 30, ge=16 << 20, le=1 << 50)
    """Memory guaranteed to a task whose dataset states none; it is killed at three times as much."""
    environment_starts: int = Field(default=8, ge=1)
    """Maximum number of environments being created on one host: beyond about 8 only latency grows."""
    image_builds: int = Field(default=2, ge=1)
    """Maximum simultaneous image builds and pulls on one host."""
    image_pulls: int = Field(default=32, ge=1)
    """Maximum simultaneous pulls from one registry, by all hosts: registries count requests by address and login."""

    image_disk_high: float = Field(default=0.9, gt=0)
    """Disk threshold above which images are removed: a share of their disk, or, above 1, bytes of all images."""
    image_disk_low: float = Field(default=0.8, gt=0)
    """Disk threshold down to which images are removed, in the same unit. Above it, no image is pulled ahead."""
    image_prefetch: int = Field(default=8, ge=0)
    """Number of images of the next waiting tasks that a host pulls ahead; 0: none."""

    engine_patience_s: float = Field(default=30.0, ge=0)
    """Time that an attempt without an environment waits for a container engine that does not answer."""

    command_log_bytes: int = Field(default=256 << 20, ge=0)
    """Maximum bytes stored per attempt of outputs that were too long to be passed on whole; 0: none."""

    # --- Leases and recovery --------------------------------------------------------------------------------------
    lease_s: float = Field(default=30.0, gt=0)
    """Duration of a worker's lease on its attempt; renewed every third of it."""
    republish_s: float = Field(default=20.0, gt=0)
    """A wake-up message that no worker claimed within this time is published again."""
    sweep_s: float = Field(default=10.0, gt=0)
    """Interval of the reconciler, and of the sweeps of a host when no instance ends."""
    retry_base_s: float = Field(default=1.0, ge=0)
    retry_cap_s: float = Field(default=60.0, ge=0)
    """Wait before the next attempt after an infrastructure fault: doubles from base to cap."""
    dispatch_batch: int = Field(default=1000, ge=1)
    """Maximum tasks admitted in one transaction."""
    dispatch_order: Literal["fair", "fifo"] = "fair"
    """Order after priority: weighted fair share between users, or first come first served for all (the paper's)."""
    audit_s: float = Field(default=60.0, gt=0)
    """Interval of the audits of the ledger's invariants."""

    # --- Model endpoint -------------------------------------------------------------------------------------------
    model_base_url: str | None = None
    """OpenAI-compatible base URL of the engine for models that have no route of their own; None: there is none."""
    model_api_key_env: str = "OPENAI_API_KEY"
    """Name of the variable that holds the key; only the gateway's process needs it."""
    shared_installation: bool = False
    """Users do not trust each other: only registered URLs of models are called."""
    replay_port: int = Field(default=8765, ge=1, le=65535)
    """Port of this host's replay engine, at `bind`."""
    replay_url: str | None = None
    """Base URL (with /v1) of a replay engine on another host; None: this host's own."""
    replay_scripts: Annotated[tuple[Path, ...], NoDecode] = ()
    """Folders of replay scripts in addition to the demo's; separated by `:` in the environment."""
    model_timeout_s: float = Field(default=120.0, gt=0)
    """Timeout of one model call at the engine; time spent waiting for limits is not counted."""
    gateway_url: Annotated[tuple[str, ...], NoDecode] = ()
    """Base URL (without /v1) of the model gateway for workers, or several, separated by commas: each attempt uses one
    of them throughout. Empty: the gateways of this host's stack."""
    gateway_port: int = Field(default=8766, ge=1, le=65535)
    """Port of this host's first gateway, at `bind`."""
    gateways: int = Field(default=1, ge=1, le=16)
    """Number of gateways of this host's stack, each a process with its own port, from `gateway_port` on."""
    gateway_patience_s: float = Field(default=300.0, gt=0)
    """Time that a call waits for a limit or a busy engine before it is refused."""
    probe_tolerance: float = Field(default=1e-3, gt=0)
    """Maximum deviation of a probe's log-probabilities when a version of a policy is published."""
    model_prices: Path | None = None
    """YAML file of prices per million tokens by model; overrides the known prices. See docs/howto/models.md."""
    agent_manifests: Annotated[tuple[Path, ...], NoDecode] = ()
    """Manifests of agents outside this repository; separated by `:` in the environment."""
    swe_agent_source: str | None = None
    """URL@REF from which git clones SWE-agent: no package index has it; see docs/howto/agents.md."""
    ready_tools: Path | None = None
    """Read-only folder of frameworks that are already installed, such as those of the worker image."""

    # --- Servers, hosts and beat ----------------------------------------------------------------------------------
    bind: str = "127.0.0.1"
    """Address on which our servers listen."""
    flower_port: int = Field(default=5555, ge=1, le=65535)
    """Port of Flower, at `bind`."""
    flower_user: str = "megaflow"
    """User name for Flower, used with `flower_password`."""
    flower_password: SecretStr | None = None
    """Password for Flower; None: `megaflow up` generates one in `home`, readable only by the owner."""
    web_port: int = Field(default=8768, ge=1, le=65535)
    """Port of the web server (pages and HTTP API), at `bind`."""
    web_url: str | None = None
    """URL of the web server for browsers elsewhere (`https://megaflow.example.org`); None: `bind` and `web_port`."""
    web_proxies: Annotated[tuple[str, ...], NoDecode] = ()
    """Networks of proxies whose X-Forwarded-For is trusted. None: all clients behind a proxy share one rate limit."""
    experience_token: SecretStr | None = Field(default=None, min_length=16)
    """Token that `megaflow experience serve` requires of trainers; None: one is generated in `home`/run."""
    join_settings: Path | None = None
    """File of lines NAME=VALUE that machines get with their accounts when they join; see docs/howto/cluster.md."""
    host_name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """Name of this host among those that share a ledger; None: its host name."""
    host_class: str = "standard"
    """Resource class of the pool and the grader on a machine that joined."""
    joined: bool = False
    """This machine joined an installation: `megaflow up` starts a pool and a grader, and nothing else."""
    server: str | None = None
    """URL of another machine's web server: commands and clients use its HTTP API and need no database of their own."""
    token: SecretStr | None = None
    """Token for that web server; `megaflow users add` creates one there."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of the control worker's metrics in Prometheus' text format, at `bind`; 0: not served."""
    traces_url: str | None = None
    """URL of an OpenTelemetry collector's trace receiver over HTTP, such as `http://collector:4318/v1/traces`: it gets
    every ended attempt; None: no traces are sent. Needs the extra `traces`."""
    schedule_tick_s: float = Field(default=5.0, gt=0)
    """Interval of beat's ticks; a due time up to three ticks old is not missed."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level that the programs log, in `home`/logs."""

    @model_validator(mode="before")
    @classmethod
    def _said_nothing(cls, values: dict[str, object]) -> dict[str, object]:
        """Drops empty values of optional settings: a compose file passes an unset variable on as empty."""
        absent = {name for name, field in cls.model_fields.items() if field.default is None}
        return {name: value for name, value in values.items() if not (value == "" and name in absent)}

    @field_validator("replay_scripts", "agent_manifests", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(Path(part) for part in value.split(":") if part) if isinstance(value, str) else value

    @field_validator("open_network_allow")
    @classmethod
    def _destinations(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            network, colon, port = one.partition(":")
            ipaddress.IPv4Network(network)
            if colon and not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
                raise ValueError(f"expected ADDRESS[/BITS][:PORT], found {one!r}")
        return value

    @field_validator("web_proxies")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(ipaddress.ip_network(one)) for one in value)

    @field_validator("gateway_url", "open_network_allow", "web_proxies", mode="before")
    @classmethod
    def _names(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("gateway_url")
    @classmethod
    def _bases(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(is_base(base) for base in value):
            raise ValueError("expected http://HOST:PORT, or several of these with commas between them")
        return tuple(dict.fromkeys(base.rstrip("/") for base in value))

    @field_validator("home")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        if not value.is_absolute():
            raise ValueError("expected the absolute path of a folder: programs with other working folders read it, too")
        return value

    @field_validator("database_url", "broker_url")
    @classmethod
    def _servers(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        known = _SCHEMES[str(info.field_name)]
        if value is not None and value.get_secret_value().partition("://")[0] not in known:
            raise ValueError(f"expected a URL that begins with {' or '.join(f'{one}://' for one in known)}")
        return value

    @field_validator("server")
    @classmethod
    def _base(cls, value: str | None) -> str | None:
        if value is not None and not is_base(value):
            raise ValueError("expected http://HOST:PORT or https://HOST")
        return value

    @field_validator("gateways")
    @classmethod
    def _own(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("gateway_url"):
            raise ValueError(f"expected 1 beside {PREFIX}GATEWAY_URL, which names all gateways there are")
        return value

    def __init__(self, **values: object) -> None:
        try:
            super().__init__(**values)  # type: ignore[arg-type]
        except ValidationError as error:
            raise SettingsInvalid(explain(error)) from error
        refuse_unknown(os.environ, type(self).model_fields)

    def variables(self) -> dict[str, str]:
        """Returns the `MEGAFLOW_*` variables from which another process builds the same settings. They hold secrets."""
        names = (self.model_fields_set - _OF_CLIENTS) | {"home", "installation"}
        return {PREFIX + name.upper(): as_text(value) for name in names if (value := getattr(self, name)) is not None}

    @property
    def in_cluster(self) -> bool:
        """Whether environments may be pods; otherwise the cluster is not checked for leftover pods."""
        return self.kubernetes_environments is not None

    @property
    def postgres_socket_dir(self) -> Path:
        """Folder of the embedded PostgreSQL's Unix socket."""
        return self.home / "run" / "postgres"

    @property
    def redis_socket(self) -> Path:
        """Unix socket of the embedded Redis."""
        return self.home / "run" / "redis" / "redis.sock"

    @property
    def tools(self) -> Path:
        """Folder of the agent frameworks' own environments; several installations may share it by a link."""
        return self.home / "tools"

    @property
    def recordings(self) -> Path:
        """Folder of recorded runs that the replay engine plays back, each in a folder of its own."""
        return self.home / "recordings"

    @property
    def embeds_postgres(self) -> bool:
        return self.database_url is None

    @property
    def embeds_redis(self) -> bool:
        return self.broker_url is None

    def database(self) -> str:
        """Returns the libpq URL of the database."""
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return f"postgresql://postgres@/megaflow?host={self.postgres_socket_dir}"

    def broker(self) -> str:
        """Returns the kombu URL of the broker."""
        if self.broker_url is not None:
            return self.broker_url.get_secret_value()
        return f"redis+socket://{self.redis_socket}"

    def redis(self) -> str:
        """Returns the redis-py URL of the same server."""
        return self.broker().replace("redis+socket://", "unix://", 1)

    def artifacts(self) -> str:
        return self.artifacts_url or f"file://{self.home / 'artifacts'}"

    def replay_endpoint(self) -> str:
        """Returns the base URL of the replay engine, which serves the models `replay` and `replay:NAME`."""
        return self.replay_url or f"http://{reached(self.bind)}:{self.replay_port}/v1"

    def host(self) -> str:
        """Returns the name of this host among those that share a ledger."""
        return self.host_name or socket.gethostname()

    def web_base(self) -> str:
        """Returns the URL of the web server, without a slash at its end."""
        return (self.web_url or f"http://{self.bind}:{self.web_port}").rstrip("/")

    def gateway_ports(self) -> tuple[int, ...]:
        """Returns the ports of this host's own gateways."""
        return () if self.gateway_url else tuple(range(self.gateway_port, self.gateway_port + self.gateways))

    def gateway_bases(self) -> tuple[str, ...]:
        """Returns the base URLs of all model gateways, without /v1."""
        return self.gateway_url or tuple(f"http://{reached(self.bind)}:{port}" for port in self.gateway_ports())

    def gateway_of(self, attempt: UUID) -> str:
        """Returns the gateway for all calls of an attempt; that gateway keeps the attempt's account.

        Chosen by hash weight: adding or removing a gateway moves no attempt between the gateways that stay.
        """
        return max(self.gateway_bases(), key=lambda base: hashlib.sha256(attempt.bytes + base.encode()).digest())

    def grading_pool(self) -> int:
        """Returns the maximum number of graders of a resource class."""
        return self.grading_instances or max(1, (os.cpu_count() or 1) // 2)

    def grading_capacity(self) -> int:
        """Returns the maximum number of simultaneous gradings of a resource class, with the pool fully grown."""
        return self.grading_pool() * self.grading_slots

    def capacity(self) -> int:
        """Returns the maximum number of ephemeral instances on this host."""
        if self.ephemeral_capacity:
            return self.ephemeral_capacity
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        by_memory = int(memory * 0.9) // self.instance_memory_bytes - self.grading_capacity()
        return max(1, min(64, 25 * (os.cpu_count() or 1), by_memory))

    def secret(self, name: str) -> SecretStr | None:
        """Returns the value of the environment variable `name`, or None. Never logged."""
        value = os.environ.get(name)
        return SecretStr(value) if value else None


def host_file(home: Path) -> Path:
    """Returns the file with the variables of a machine that joined."""
    return home / "host.env"


@lru_cache(maxsize=1)
def load() -> Settings:
    """Reads the settings of this process once; a joined machine's file supplies what the environment leaves out."""
    file = host_file(Path(os.environ.get(f"{PREFIX}HOME") or Path.home() / ".megaflow"))
    if file.is_file():
        for name, value in dotenv_values(file, interpolate=False).items():
            os.environ.setdefault(name, value or "")
    return Settings()


@contextmanager
def given(**values: str | None) -> Iterator[None]:
    """Overrides settings within the block, for this process and those that it starts; None changes nothing."""
    names = {PREFIX + name.upper(): value for name, value in values.items() if value is not None}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    load.cache_clear()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        load.cache_clear()
