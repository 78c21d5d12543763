"""The agent task and its spec, as frozen models.

The paper's six-tuple (E, D, G, S, A, T), made concrete: E = `environment`, D = `description`, G = `goal`, A = what
`environment.network` and the limits leave open, S = the environment's files and processes, T = what the environment
does with a command. Source: MegaFlow, appendix A.2.
"""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from app.errors import SpecInvalid
from app.models.hosts import AllowedHosts
from app.models.resources import MOST_BYTES
from app.models.resources import Resources as Resources
from app.models.wire import Wire as Wire

NAME = r"^[A-Za-z0-9][A-Za-z0-9._/+-]{0,199}$"


_MOST_S = 30 * 86_400.0
_MOST_COUNT = 2**31 - 1
_MOST_LABEL = 200
MOST_PRIORITY = 1_000_000
"""Either way."""
MOST_WAIT_S = 10 * 365 * 86_400.0
"""Of what a producer asks to be waited for."""
_IMAGE = re.compile(
    r"(?:sha256:)?[0-9a-f]{64}"  # an image's id
    r"|(?:(?:\[[0-9a-fA-F:]+\]|[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?)(?::[0-9]{1,5})?/)?"  # registry
    r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"  # path
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"  # tag, digest
)


def plain_text(value: str) -> str:
    """With the replacement character for NUL and for halves of surrogate pairs, which PostgreSQL cannot hold."""
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def _plain(value: str) -> str:
    if "\0" in value or (not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value)):
        raise ValueError("expected text without NUL and halves of surrogate pairs, found one")
    return value


def _label(value: str) -> str:
    if not value.isprintable() or len(value) > _MOST_LABEL:
        raise ValueError(f"expected at most {_MOST_LABEL} printable characters, found {value[:_MOST_LABEL]!r}")
    return value


def _image_name(value: str) -> str:
    if len(value) > 512 or not _IMAGE.fullmatch(value):
        raise ValueError(f"expected an image reference such as registry.example.org/name:tag, found {value[:200]!r}")
    return value


PlainText = Annotated[str, AfterValidator(_plain)]
"""Text that a command line, a variable and PostgreSQL can hold."""
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
FolderText = Annotated[PlainText, Field(pattern=r"^/")]
"""An absolute path inside an environment."""
LabelText = Annotated[PlainText, AfterValidator(_label)]
"""A name that people give and read: of a run, of a user."""
ArgumentText = Annotated[PlainText, Field(max_length=16_384)]
ImageName = Annotated[str, AfterValidator(_image_name)]


class Mode(StrEnum):
    """On what kind of instance a task runs."""

    EPHEMERAL = "ephemeral"  # an instance of its own, gone afterwards
    PERSISTENT = "persistent"  # a standing pool that reuses what it has
    AUTO = "auto"  # the scheduler chooses


class EnvironmentKind(StrEnum):
    DOCKER = "docker"  # a container; how it is made is `Settings.container_runtime`
    OCI = "oci"  # a container made without a daemon, by name
    KUBERNETES = "kubernetes"  # a pod of a cluster, which pulls the image itself
    LOCAL = "local"  # a temporary folder and a process group: no isolation, only by name


IMAGELESS = frozenset({EnvironmentKind.LOCAL})
"""Kinds that no engine and no registry has anything to do with."""


SEVERAL = "compose:"
"""So begins what stands for the images of several containers at once: hosts without an engine have no use for them."""


TOOLS_INSIDE = "/opt/megaflow/tools"
"""Below it stand the bundles of `EnvironmentSpec.tools`, each by its name, read-only."""


class Network(StrEnum):
    """What a task's containers reach."""

    NONE = "none"  # nothing but themselves
    MODEL_ONLY = "model-only"  # the model's endpoint, at a port of their own loopback, and nothing else
    ALLOWLIST = "allowlist"  # the hosts of `EnvironmentSpec.allowed_hosts`, by an HTTP proxy on their own loopback
    OPEN = "open"


class Reuse(StrEnum):
    """Whether a persistent worker may hand this task an environment that another task has used."""

    FRESH = "fresh"
    RECYCLED = "recycled"  # reset, and proven clean
    SHARED_READONLY = "shared-readonly"  # with a read-only root, shared at the same time by tasks of one run


class Bundle(Wire):
    """A folder in the artifact store, addressed by content. `sha256` is of the uncompressed, normalised tar."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size_bytes: int = Field(ge=0, le=MOST_BYTES)


class Build(Wire):
    """An image made from a build context."""

    context: Bundle
    dockerfile: PlainText = "Dockerfile"
    timeout_s: float = Field(default=900.0, gt=0, le=_MOST_S)


class Compose(Wire):
    """Several containers, as a compose file describes them; the agent acts in one of its services."""

    context: Bundle  # the folder with the file and with what its services are built from
    file: str = "docker-compose.yaml"
    service: str = "main"


class Reach(Wire):
    """What a container reaches."""

    network: Network = Network.NONE
    allowed_hosts: tuple[str, ...] = ()  # names, or `*.name`, each with an optional `:port`; for `allowlist`

    @model_validator(mode="after")
    def _hosts_with_their_policy(self) -> Self:
        if bool(self.allowed_hosts) != (self.network is Network.ALLOWLIST):
            raise ValueError(
                f"expected `allowed_hosts` with the network `allowlist` and only there, found {self.network.value!r}"
                f" with {list(self.allowed_hosts)!r}"
            )
        try:
            AllowedHosts(self.allowed_hosts)
        except SpecInvalid as error:
            raise ValueError(str(error)) from error
        return self


class EnvironmentSpec(Reach):
    """E: where the agent acts. Exactly one of `image`, `build` and `compose`.

    With `compose`, `resources` bound its main service; the others have what the file says, at most as much, and, where
    a host can, all together twice as much.
    """

    kind: EnvironmentKind = EnvironmentKind.DOCKER
    image: ImageName | None = None
    build: Build | None = None
    compose: Compose | None = None
    workdir: FolderText = "/testbed"
    resources: Resources = Resources()
    grading: Reach = Reach()  # of a `TestsGoal`'s grader, by its dataset: no submission and no agent changes it
    env: dict[PlainText, PlainText] = {}  # no secrets: this is stored and shown
    setup: tuple[PlainText, ...] = ()
    tools: tuple[ToolName, ...] = ()  # frameworks that act inside, mounted read-only: set by who submits, per agent
    reuse: Reuse = Reuse.RECYCLED

    @model_validator(mode="after")
    def _one_source(self) -> EnvironmentSpec:
        if [self.image, self.build, self.compose].count(None) != 2:
            raise ValueError(
                "expected exactly one of `image` (a reference), `build` (a context) and `compose` (several services)"
            )
        return self

    @model_validator(mode="after")
    def _several_take_an_engine_and_one_task(self) -> EnvironmentSpec:
        if self.compose is not None and self.kind is not EnvironmentKind.DOCKER:
            raise ValueError(f"expected the kind 'docker' for several containers, found {self.kind.value!r}")
        if self.compose is not None and self.reuse is Reuse.SHARED_READONLY:
            raise ValueError(
                "expected `reuse` 'fresh' or 'recycled' with several containers, found 'shared-readonly': they belong"
                " to one task, and other services can be written to; leave `reuse` out"
            )
        return self

    def for_grading(self, reach: Reach) -> EnvironmentSpec:
        """What a grader has that judges in an environment of its own: no framework, and files that it may change."""
        reuse = Reuse.FRESH if self.reuse is Reuse.SHARED_READONLY else self.reuse
        hosts, network = reach.allowed_hosts, reach.network
        return self.model_copy(update={"tools": (), "reuse": reuse, "network": network, "allowed_hosts": hosts})

    @property
    def label(self) -> str:
        """The image's reference, or the context's digest, for a person."""
        if self.image is not None:
            return self.image
        if self.compose is not None:
            return f"{SEVERAL}{self.compose.context.sha256[:12]}"
        return f"build:{self.build.context.sha256[:12] if self.build else '?'}"


class JudgeName(StrEnum):
    """Who reads the report of a test run and decides what it means."""

    OWN = "own"  # ours: the parser that `log_parser` names; skipped tests of `pass_to_pass` are fine
    SWEBENCH_4 = "swebench-4"  # the package of that major version, by the row's repository and version
    SWEBENCH_5 = "swebench-5"  # the package of that major version, by the parser that the row names
    MULTI_SWE_BENCH = "multi-swe-bench"
    SWESMITH = "swesmith"
    EXIT_CODE = "exit-code"  # the test command's: 0 is right


class TestsGoal(Wire):
    """G of a repository's dataset: named tests must pass after the agent's patch and the hidden tests are in place.

    Graded in an environment of its own, in which the agent never was, in this order: the repository is at `base_commit`
    (compared with HEAD), the agent's patch, `install_command`, the hidden tests, `build_command`, `test_command`, the
    judge. Reward 1.0 when the judge finds the task resolved, else 0.0.
    """

    __test__ = False  # not a test class, whatever pytest thinks of the name
    kind: Literal["tests"] = "tests"
    base_commit: Annotated[PlainText, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z._/-]{0,199}$")]
    test_patch: PlainText = ""  # empty: the test command lays them out itself
    install_command: PlainText = ""  # builds again what the patch changed
    build_command: PlainText = ""  # builds what needs the hidden tests, too: its output is not judged
    test_command: PlainText
    judge: JudgeName = JudgeName.OWN
    log_parser: str = "pytest"  # by the name that the judge knows it by
    fail_to_pass: tuple[PlainText, ...]
    pass_to_pass: tuple[PlainText, ...]
    patch_path: FolderText | None = None  # the dataset's own script reads the agent's patch here; None: we apply it
    test_patch_path: FolderText | None = None  # the same, of the hidden tests
    row: dict[str, Any] = {}  # what else of the dataset's row the judge needs, by the dataset's names


class ServiceScript(Wire):
    """One more script that judges, and the service in which it runs."""

    service: PlainText
    command: PlainText


RewardNumber = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]


def _rising(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] >= bounds[1]:
        raise ValueError(f"expected the lowest reward, then the highest, found {list(bounds)}")
    return bounds


RewardRange = Annotated[tuple[RewardNumber, RewardNumber], AfterValidator(_rising)]
"""The lowest and the highest reward that a task gives."""


class ScriptGoal(Wire):
    """G, Harbor and Terminal-Bench: a script looks at what the agent left and writes a reward file.

    Graded in the agent's own environment; `tests` arrives there only after the agent has ended. With `environment` it
    is graded there instead, where the agent never was: `artifacts` alone are handed over, at their own paths. With
    `also` every script must be content: the lowest reward is the task's.
    """

    kind: Literal["script"] = "script"
    tests: Bundle
    command: PlainText = "bash /tests/test.sh"
    tests_path: PlainText = "/tests"
    logs_path: PlainText = "/logs"
    service: str | None = None  # in which the tests run, of several; None: where the agent acted
    also: tuple[ServiceScript, ...] = ()  # judge, too, each in its service, after `command`
    environment: EnvironmentSpec | None = None  # of the verifier; None: where the agent acted
    artifacts: tuple[FolderText, ...] = ()  # files and folders that the agent's environment hands to the verifier's
    brings_tests: bool = False  # the verifier's image has the tests already
    reward_range: RewardRange | None = None  # a reward outside of it is none; None: the task states no range

    @model_validator(mode="after")
    def _apart_in_one_container(self) -> ScriptGoal:
        if self.environment is not None and (self.service is not None or self.also):
            raise ValueError("expected no services that judge beside an environment of the verifier's own, found some")
        if self.environment is None and (self.artifacts or self.brings_tests):
            raise ValueError("expected `artifacts` and `brings_tests` with `environment`, found them alone")
        return self

    @model_validator(mode="after")
    def _each_service_once(self) -> ScriptGoal:
        services = [self.service, *(one.service for one in self.also)]
        if len(set(services)) < len(services):
            raise ValueError(f"expected each service to judge once, found {services!r}")
        return self


Goal = Annotated[TestsGoal | ScriptGoal, Field(discriminator="kind")]


class PatchSolution(Wire):
    """The gold answer as a patch against the base commit. Only `oracle` ever sees it."""

    kind: Literal["patch"] = "patch"
    patch: PlainText
    reverse: bool = False  # the dataset's patch is the bug: taking it away is the answer


class ScriptSolution(Wire):
    """The gold answer as a script in a folder."""

    kind: Literal["script"] = "script"
    files: Bundle
    command: PlainText = "bash /solution/solve.sh"
    path: PlainText = "/solution"


Solution = Annotated[PatchSolution | ScriptSolution, Field(discriminator="kind")]


class Limits(Wire):
    """How much of everything one attempt may use."""

    environment_timeout_s: float = Field(default=900.0, gt=0, le=_MOST_S)  # image, build, start, set-up
    agent_timeout_s: float = Field(default=1800.0, gt=0, le=_MOST_S)
    grading_timeout_s: float = Field(default=900.0, gt=0, le=_MOST_S)
    command_timeout_s: float = Field(default=120.0, gt=0, le=_MOST_S)  # one command of the agent
    max_steps: int = Field(default=100, ge=1, le=_MOST_COUNT)  # the paper's interaction rounds
    max_turn_tokens: int | None = Field(default=None, ge=1, le=_MOST_COUNT)  # of one answer of the model
    context_tokens: int | None = Field(default=None, ge=1, le=_MOST_COUNT)  # both ways; None: what the model takes
    budget_usd: float | None = Field(default=None, gt=0)  # of model calls
    max_attempts: int = Field(default=3, ge=1, le=20)  # infrastructure faults before "not scored"

    @property
    def lifetime_s(self) -> float:
        """One deadline from the claim to the teardown; the rest is for artifacts and cleaning up.

        Twice the agent's time: what limits make its model calls wait is given back to it, up to as much again. Thrice
        the grading's: one that breaks is done again, and with the gold solution, to find out whose fault it is.
        """
        return self.environment_timeout_s + 2 * self.agent_timeout_s + 3 * self.grading_timeout_s + 120.0


class AgentTask(Wire):
    """One agent task as a dataset or a producer describes it: what to do, where, and how it is judged."""

    name: str = Field(pattern=NAME)  # the dataset's id of it, e.g. django__django-13251
    dataset: PlainText = "adhoc"
    description: PlainText = Field(min_length=1)  # D: what the agent is told, verbatim
    environment: EnvironmentSpec
    goal: Goal
    solution: Solution | None = None
    limits: Limits = Limits()

    @property
    def graded_apart(self) -> bool:
        """Whether its grading needs nothing of the agent's environment but what is taken out of it."""
        return isinstance(self.goal, TestsGoal) or self.goal.environment is not None

    @property
    def verifier(self) -> EnvironmentSpec:
        """Where it is graded when that is not where the agent acted."""
        if isinstance(self.goal, TestsGoal):
            return self.environment.for_grading(self.environment.grading)
        own = self.goal.environment or self.environment
        return own.for_grading(own)

    @model_validator(mode="after")
    def _judged_apart_when_shared(self) -> AgentTask:
        if self.environment.reuse is Reuse.SHARED_READONLY and isinstance(self.goal, ScriptGoal):
            raise ValueError(
                "expected `fresh` or `recycled` with a goal that is judged by a script in the agent's own environment,"
                " found `shared-readonly`: several tasks would write their rewards to one place"
            )
        return self


class Sampling(Wire):
    """How the model draws its answers. The gateway puts a given value in place of the agent's own, in every call."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)  # of one answer
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    token_ids: bool | None = None  # ask engines for token ids and log-probabilities; set for training


REPLAY_MODEL = "replay"
"""The model that is the replay engine: it picks a script by the task."""


class ModelChoice(Wire):
    """Which model an agent talks to. Keys are not part of it: `api_key_env` is the *name* of a variable."""

    name: str
    base_url: str | None = None  # None: the endpoint of the settings
    api_key_env: str | None = None
    sampling: Sampling | None = None
    side_models: tuple[str, ...] = ()  # that the agent may call beside `name`, at the same endpoint or by their routes

    @property
    def replay(self) -> bool:
        """Whether the name means the replay engine: `replay`, `replay:RUN`, `replay:SCRIPT`, `scenario-SCRIPT`."""
        return self.name == REPLAY_MODEL or self.name.startswith((f"{REPLAY_MODEL}:", "scenario-"))


AgentArgs = dict[Annotated[PlainText, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,79}$")], ArgumentText]
"""What `--agent-arg KEY=VALUE` gives, by key."""


NOT_SUBMITTED = "not_submitted"
"""In `RewardRules`: every end that is a result, but for `submitted`."""
RewardRules = dict[str, RewardNumber]
"""Rewards by end reason (`EndReason`, or `NOT_SUBMITTED`): part of what a run is to measure or to train for."""


class TaskSpec(Wire):
    """An agent task together with who does it and how: what is stored, hashed, and carried to the worker."""

    task: AgentTask
    agent: str
    model: ModelChoice | None = None
    mode: Mode = Mode.AUTO
    resource_class: str = "standard"
    agent_args: AgentArgs = {}  # by the names that the agent's adapter knows
    rewards: RewardRules = {}  # of attempts that end so, whatever their tests say
    record_diffs: bool = False  # keep the repository's diff after each step

    def digest(self) -> str:
        """sha256 of the canonical JSON: equal specs share one row."""
        return self.digest_of(self.model_dump_json())

    @staticmethod
    def digest_of(body: str) -> str:
        """The digest of a spec whose JSON is at hand."""
        return hashlib.sha256(body.encode()).hexdigest()
