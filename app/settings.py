"""All settings, with units and reasons; only here are they read from the process environment.

Each is set by an environment variable `MEGAFLOW_<NAME>`; a variable of that prefix which no field has is refused, so
that a typo cannot pass silently. Where no URL is given, the embedded service in `home` is used.
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
"""Fields of those who ask an installation from elsewhere: no process of an installation gets them."""

ProviderName = Literal["process", "docker", "slurm", "kubernetes", "ec2", "alibaba", "simulated"]


class Settings(ProviderSettings):
    """One installation of MegaFlow."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, allow_inf_nan=False)

    # --- Where things are -----------------------------------------------------------------------------------------
    home: Path = Field(default_factory=lambda: Path.home() / ".megaflow")
    """State of this installation: embedded servers, logs, artifacts, agents' environments."""
    database_url: SecretStr | None = None
    """`postgresql://…`; None: the embedded PostgreSQL, on a Unix socket in `home`."""
    installation: str = Field(
        default_factory=lambda known: "default" if known.get("database_url") else name_of(known.get("home", Path("/"))),
        validate_default=True,
        pattern=r"^[a-z0-9][a-z0-9-]{0,40}$",
    )
    """Label on everything created in the engine: two under one name sweep each other's containers. Not set: the name of
    `home`, which the file `installation` there keeps (`default` in a home of an earlier version; a copy of a home needs
    another); beside MEGAFLOW_DATABASE_URL, which several hosts may share: `default`."""
    broker_url: SecretStr | None = None
    """`redis://…`; None: the embedded Redis, on a Unix socket in `home`."""
    artifacts_url: str | None = None
    """`s3://bucket/prefix` or `file:///folder`; None: `home`/artifacts."""
    s3_endpoint_url: str | None = None
    """An S3-compatible server; None: AWS. Credentials come from boto3's own chain."""
    artifact_links_bytes: int = Field(default=0, ge=0)
    """Browsers fetch larger artifacts from the store itself, by links that lapse after five minutes; 0: none. For
    stores that can sign, at addresses that browsers reach."""
    docker_url: str | None = None
    """`unix://…` or `tcp://…`; None: DOCKER_HOST, else the default socket."""
    container_runtime: Literal["auto", "docker"] = "auto"
    """Who makes containers: `docker`, an engine always; `auto`: this host itself where it allows that and the task
    wants no network, which takes a tenth of the time, else an engine."""
    image_mirror: str | None = None
    """Registry (host[:port]/prefix) tried first for every image reference."""
    registry_auth: SecretStr | None = None
    """Logins beside those of `docker login`, as JSON: `{"registry.example:5000": "USER:PASSWORD", …}`."""
    open_network_filter: bool = True
    """Tasks with the network `open` start only when packet rules keep them from the engine's host, link-local and
    private addresses. False: no such rules are asked for."""
    open_network_allow: Annotated[tuple[str, ...], NoDecode] = ()
    """Private addresses that these tasks may reach all the same: ADDRESS[/BITS][:PORT] (IPv4), separated by commas."""
    base_image: str = "megaflow/base:bookworm"
    """What task recipes build FROM when they take the argument BASE_IMAGE."""

    # --- What runs ------------------------------------------------------------------------------------------------
    ephemeral_provider: ProviderName = "process"
    persistent_provider: ProviderName = "process"
    ephemeral_capacity: int = Field(default=0, ge=0)
    """Ephemeral instances at once; 0: by this host's memory (`instance_memory_bytes` each), at most 25 for a core
    (agents mostly wait for their model) and 64 in all."""
    instance_memory_bytes: int = Field(default=384 << 20, gt=0)
    """What one attempt takes on the host: a worker, an agent framework, a small container."""
    persistent_instances: int = Field(default=1, ge=0)
    """Standing instances of the pool; `megaflow classes set standard --pool-min … --pool-max …` makes it elastic."""
    persistent_slots: int = Field(default=4, ge=1)
    """Attempts at once on one standing instance."""
    host_cpu_most: float = Field(default=0.6, ge=0, le=1)
    """A host takes no more attempts on its standing instances while some process waits for a CPU for more of the time
    than this share, beyond two attempts a core (four at least); nor at all while less than a tenth of its memory is
    available. 0: its pressure is not looked at."""
    pool_rest_s: float = Field(default=60.0, ge=0)
    """Tasks of mode `auto` keep away from a persistent pool while most attempts that ended there within this time, of
    three tasks at least, failed for reasons of the infrastructure. 0: they do not."""
    grading_instances: int = Field(default=0, ge=0)
    """Graders at once, of each resource class, started when an attempt that is graded in an environment of its own
    runs; 0: by this host's processors, one for every two."""
    grading_slots: int = Field(default=4, ge=1)
    """Gradings at once on one of them; `ephemeral_capacity` leaves their memory to them."""
    pool_cooldown_s: float = Field(default=60.0, ge=0)
    """A pool that had more standing instances than needed for this long drains the least busy one."""
    quarantine_after: int = Field(default=3, ge=1)
    """Quarantine an instance after this many consecutive infrastructure failures."""
    orphan_s: float = Field(default=180.0, gt=0)
    """How long an instance goes on without reaching the ledger before it ends itself."""
    ephemeral_lifetime_s: float = Field(default=6 * 3600.0, gt=0)
    """An ephemeral instance is ended from outside after this long, whatever it does."""
    ephemeral_idle_s: float = Field(default=30.0, gt=0)
    """An ephemeral worker that got nothing for this long leaves."""
    drain_s: float = Field(default=2.0, ge=0)
    """A worker that is told to stop finishes what ends within this time, and gives the rest back."""
    boot_timeout_s: float = Field(default=60.0, gt=0)
    """An instance that is not ready by then has failed."""
    task_cpus: float = Field(default=2.0, gt=0, le=256)
    """Processors guaranteed to a task whose dataset states none; it may take three times as much."""
    task_memory_bytes: int = Field(default=2 << 30, ge=16 << 20, le=1 << 50)
    """Memory guaranteed to a task whose dataset states none; it is killed at three times as much."""
    environment_starts: int = Field(default=8, ge=1)
    """Environments being created at once on one host: beyond about 8 only latency grows."""
    image_builds: int = Field(default=2, ge=1)
    """Image builds and pulls at once on one host."""
    image_pulls: int = Field(default=32, ge=1)
    """Pulls at once from one registry, by all hosts: registries count requests by address and by login."""

    image_disk_high: float = Field(default=0.9, gt=0)
    """Images leave when their disk is fuller than this: a share of it, or, above 1, bytes of all images."""
    image_disk_low: float = Field(default=0.8, gt=0)
    """Until it is no fuller than this, in the same unit. Nothing is pulled ahead above it."""
    image_prefetch: int = Field(default=8, ge=0)
    """Images of the next waiting tasks that a host pulls ahead; 0: none."""

    engine_patience_s: float = Field(default=30.0, ge=0)
    """How long an attempt without an environment waits for a container engine that does not answer."""

    command_log_bytes: int = Field(default=256 << 20, ge=0)
    """Of an attempt's outputs that are too long to be handed on whole, so much in all is kept as evidence; 0: none."""

    # --- Leases and recovery --------------------------------------------------------------------------------------
    lease_s: float = Field(default=30.0, gt=0)
    """How long a silent worker keeps its attempt; renewed every third of it."""
    republish_s: float = Field(default=20.0, gt=0)
    """A wake-up message that no worker claimed within this time is published again."""
    sweep_s: float = Field(default=10.0, gt=0)
    """Between two rounds of the reconciler, and between two sweeps of a host when no instance ends."""
    retry_base_s: float = Field(default=1.0, ge=0)
    retry_cap_s: float = Field(default=60.0, ge=0)
    """Wait before the next attempt after an infrastructure fault: doubles from base to cap."""
    dispatch_batch: int = Field(default=1000, ge=1)
    """Tasks admitted in one transaction."""
    dispatch_order: Literal["fair", "fifo"] = "fair"
    """After the priority: weighted fair share between users, or first come first served for all (the paper's)."""
    audit_s: float = Field(default=60.0, gt=0)
    """Between two audits of the ledger's invariants."""

    # --- Model endpoint -------------------------------------------------------------------------------------------
    model_base_url: str | None = None
    """OpenAI-compatible base URL of the engine for models that have no route of their own; None: there is none."""
    model_api_key_env: str = "OPENAI_API_KEY"
    """Name of the variable that holds the key; only the gateway's process needs to have it."""
    shared_installation: bool = False
    """Several people submit who do not trust each other: only registered URLs of models are called."""
    replay_port: int = Field(default=8765, ge=1, le=65535)
    """Where this host's replay engine listens, at `bind`."""
    replay_url: str | None = None
    """Base URL (with /v1) of a replay engine elsewhere; None: this host's own."""
    replay_scripts: Annotated[tuple[Path, ...], NoDecode] = ()
    """More folders of replay scripts beside the demo's; separated by `:` in the environment."""
    model_timeout_s: float = Field(default=120.0, gt=0)
    """One model call, as the engine may take it; what limits make it wait is not counted."""
    gateway_url: Annotated[tuple[str, ...], NoDecode] = ()
    """Base URL (without /v1) at which workers reach the model gateway, or several, separated by commas: each attempt
    keeps to one of them. Empty: those of this host's stack."""
    gateway_port: int = Field(default=8766, ge=1, le=65535)
    """Where this host's first gateway listens, at `bind`."""
    gateways: int = Field(default=1, ge=1, le=16)
    """Gateways of this host's stack, each a process on a port of its own, from `gateway_port` on."""
    gateway_patience_s: float = Field(default=300.0, gt=0)
    """How long a call waits for a limit or a busy engine before it is refused."""
    probe_tolerance: float = Field(default=1e-3, gt=0)
    """How far log-probabilities of a probe may be off when a version of a policy is published."""
    model_prices: Path | None = None
    """YAML file of prices per million tokens by model, before those that are known; see docs/howto/models.md."""
    agent_manifests: Annotated[tuple[Path, ...], NoDecode] = ()
    """Manifests of agents that live outside this repository; separated by `:` in the environment."""
    swe_agent_source: str | None = None
    """URL@REF from which git clones SWE-agent: it is on no package index; see docs/howto/agents.md."""
    ready_tools: Path | None = None
    """Folder of frameworks that are installed already and never written to, such as those of the worker image."""

    # --- Flower and beat ------------------------------------------------------------------------------------------
    bind: str = "127.0.0.1"
    """Address that our servers listen on."""
    flower_port: int = Field(default=5555, ge=1, le=65535)
    """Where Flower listens, at `bind`."""
    flower_user: str = "megaflow"
    """Whom Flower lets in, with `flower_password`."""
    flower_password: SecretStr | None = None
    """None: one is made at `megaflow up` and kept in `home`, readable by the owner alone."""
    web_port: int = Field(default=8768, ge=1, le=65535)
    """Where the web server listens, at `bind`: pages and the HTTP API."""
    web_url: str | None = None
    """How browsers reach it from elsewhere, such as `https://megaflow.example.org`; None: `bind` and `web_port`."""
    web_proxies: Annotated[tuple[str, ...], NoDecode] = ()
    """Networks of proxies whose X-Forwarded-For says who asks. None: all behind one share the rate of strangers."""
    experience_token: SecretStr | None = Field(default=None, min_length=16)
    """What `megaflow experience serve` asks of trainers; None: one is made and kept in `home`/run."""
    join_settings: Path | None = None
    """File of lines NAME=VALUE that machines get beside their accounts when they join; see docs/howto/cluster.md."""
    host_name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """What this host is called among those that share a ledger; None: its own name."""
    host_class: str = "standard"
    """Resource class of the pool and the grader of a machine that joined."""
    joined: bool = False
    """This machine joined an installation: `megaflow up` starts a pool and a grader, and nothing else."""
    server: str | None = None
    """URL of another machine's web server: commands and clients ask its HTTP API, and need no database of their own."""
    token: SecretStr | None = None
    """What it asks of clients: `megaflow users add` makes one there."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Where the control worker shows metrics in Prometheus' text format, at `bind`; 0: nowhere."""
    traces_url: str | None = None
    """A collector's receiver of OpenTelemetry traces over HTTP, such as `http://collector:4318/v1/traces`: it gets each
    ended attempt; None: traces are not sent. Needs the extra `traces`."""
    schedule_tick_s: float = Field(default=5.0, gt=0)
    """Between two ticks of beat; a due time that is up to three ticks old is not missed."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """What the programs' logs, in `home`/logs, begin with."""

    @model_validator(mode="before")
    @classmethod
    def _said_nothing(cls, values: dict[str, object]) -> dict[str, object]:
        """An empty value of what may be left out leaves it out: a compose file passes an unset variable on as empty."""
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
        """The `MEGAFLOW_*` variables from which another process builds the same settings. Holds secrets."""
        names = (self.model_fields_set - _OF_CLIENTS) | {"home", "installation"}
        return {PREFIX + name.upper(): as_text(value) for name in names if (value := getattr(self, name)) is not None}

    # --- Derived --------------------------------------------------------------------------------------------------
    @property
    def in_cluster(self) -> bool:
        """Whether environments may be pods: only then is the cluster asked for what is left there."""
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
        """libpq URL of the database."""
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return f"postgresql://postgres@/megaflow?host={self.postgres_socket_dir}"

    def broker(self) -> str:
        """kombu URL of the broker."""
        if self.broker_url is not None:
            return self.broker_url.get_secret_value()
        return f"redis+socket://{self.redis_socket}"

    def redis(self) -> str:
        """redis-py URL of the same server."""
        return self.broker().replace("redis+socket://", "unix://", 1)

    def artifacts(self) -> str:
        return self.artifacts_url or f"file://{self.home / 'artifacts'}"

    def replay_endpoint(self) -> str:
        """Base URL of the replay engine, which answers for the models `replay` and `replay:NAME`."""
        return self.replay_url or f"http://{reached(self.bind)}:{self.replay_port}/v1"

    def host(self) -> str:
        """What this host is called among those that share a ledger."""
        return self.host_name or socket.gethostname()

    def web_base(self) -> str:
        """URL of the web server, without a slash at its end."""
        return (self.web_url or f"http://{self.bind}:{self.web_port}").rstrip("/")

    def gateway_ports(self) -> tuple[int, ...]:
        """Ports of this host's own gateways."""
        return () if self.gateway_url else tuple(range(self.gateway_port, self.gateway_port + self.gateways))

    def gateway_bases(self) -> tuple[str, ...]:
        """Base URLs of all model gateways, without /v1."""
        return self.gateway_url or tuple(f"http://{reached(self.bind)}:{port}" for port in self.gateway_ports())

    def gateway_of(self, attempt: UUID) -> str:
        """The one that serves this attempt, for all of its calls: it keeps the attempt's account.

        By weight of the hash, so that another one more, or one less, moves no attempt between those that stay.
        """
        return max(self.gateway_bases(), key=lambda base: hashlib.sha256(attempt.bytes + base.encode()).digest())

    def grading_pool(self) -> int:
        """Graders of a resource class at once."""
        return self.grading_instances or max(1, (os.cpu_count() or 1) // 2)

    def grading_capacity(self) -> int:
        """Gradings of a resource class at once, as far as the pool may grow."""
        return self.grading_pool() * self.grading_slots

    def capacity(self) -> int:
        """Ephemeral instances at once on this host."""
        if self.ephemeral_capacity:
            return self.ephemeral_capacity
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        by_memory = int(memory * 0.9) // self.instance_memory_bytes - self.grading_capacity()
        return max(1, min(64, 25 * (os.cpu_count() or 1), by_memory))

    def secret(self, name: str) -> SecretStr | None:
        """The value of the environment variable `name`, or None. Never logged."""
        value = os.environ.get(name)
        return SecretStr(value) if value else None


def host_file(home: Path) -> Path:
    """Where a machine that joined has its variables."""
    return home / "host.env"


@lru_cache(maxsize=1)
def load() -> Settings:
    """The settings of this process, read once; a machine that joined has a file for what the environment leaves out."""
    file = host_file(Path(os.environ.get(f"{PREFIX}HOME") or Path.home() / ".megaflow"))
    if file.is_file():
        for name, value in dotenv_values(file, interpolate=False).items():
            os.environ.setdefault(name, value or "")
    return Settings()


@contextmanager
def given(**values: str | None) -> Iterator[None]:
    """For the block, these settings are as given, for this process and those that it starts; None changes nothing."""
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
