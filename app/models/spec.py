"""Defines the agent task and its spec, as frozen models.

Implements the paper's six-tuple (E, D, G, S, A, T): E = `environment`, D = `description`, G = `goal`, A = actions
allowed by `environment.network` and the limits, S = the environment's files and processes, T = the environment's
reaction to a command. Source: MegaFlow, appendix A.2.
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
"""Limit of a priority's absolute value."""
MOST_WAIT_S = 10 * 365 * 86_400.0
"""Limit of a waiting time set by a producer."""
_IMAGE = re.compile(
    r"(?:sha256:)?[0-9a-f]{64}"  # an image's id
    r"|(?:(?:\[[0-9a-fA-F:]+\]|[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?)(?::[0-9]{1,5})?/)?"  # registry
    r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"  # path
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"  # tag, digest
)


def plain_text(value: str) -> str:
    """Replaces NUL and halves of surrogate pairs, which PostgreSQL cannot store, by the replacement character."""
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def _plain(value: str) -> str:
    if "\0" in value or (not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value)):
        raise ValueError("expected text without NUL and halves of surrogate pairs, found one")
    return value


def _label(value: str) -> str:
    if not value.isprintable() or len(value) > _MOST_LABEL:
        raise ValueError(f"expected at most {_MOST_LABEL} printable characters, found {value[:_MOST_LABEL]!r}")
    if value.startswith("-"):
        raise ValueError(f"expected a name that does not begin with '-', as options do, found {value!r}")
    return value


def _image_name(value: str) -> str:
    if len(value) > 512 or not _IMAGE.fullmatch(value):
        raise ValueError(f"expected an image reference such as registry.example.org/name:tag, found {value[:200]!r}")
    return value


PlainText = Annotated[str, AfterValidator(_plain)]
"""Text that is valid in a command line, a variable and PostgreSQL."""
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
FolderText = Annotated[PlainText, Field(pattern=r"^/")]
"""An absolute path inside an environment."""
LabelText = Annotated[PlainText, AfterValidator(_label)]
"""A name for people: of a run, of a user."""
ArgumentText = Annotated[PlainText, Field(max_length=16_384)]
ImageName = Annotated[str, AfterValidator(_image_name)]


class Mode(StrEnum):
    """Kind of instance that a task runs on."""

    EPHEMERAL = "ephemeral"  # its own instance, ended afterwards
    PERSISTENT = "persistent"  # a standing pool that reuses environments
    AUTO = "auto"  # the scheduler chooses


class EnvironmentKind(StrEnum):
    DOCKER = "docker"  # a container, created by `Settings.container_runtime`
    OCI = "oci"  # a container created without a daemon; only if named explicitly
    KUBERNETES = "kubernetes"  # a pod of a cluster, which pulls the image itself
    LOCAL = "local"  # a temporary folder and a process group: no isolation; only if named explicitly


IMAGELESS = frozenset({EnvironmentKind.LOCAL})
"""Kinds without a container engine and a registry."""


SEVERAL = "compose:"
"""Prefix of the name for the images of several containers together. Hosts without an engine cannot use them."""


TOOLS_INSIDE = "/opt/megaflow/tools"
"""Folder of the bundles of `EnvironmentSpec.tools`, one subfolder per name, read-only."""


class Network(StrEnum):
    """Network access of a task's containers."""

    NONE = "none"  # nothing but themselves
    MODEL_ONLY = "model-only"  # only the model's endpoint, at a port of their own loopback
    ALLOWLIST = "allowlist"  # the hosts of `EnvironmentSpec.allowed_hosts`, by an HTTP proxy on their own loopback
    OPEN = "open"


class Reuse(StrEnum):
    """Whether a persistent worker may give this task an environment that another task has used."""

    FRESH = "fresh"
    RECYCLED = "recycled"  # reset, and verified clean
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

    context: Bundle  # the folder with the file and the build contexts of its services
    file: str = "docker-compose.yaml"
    service: str = "main"


class Reach(Wire):
    """Network access of a container."""

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
    """E: the agent's environment. Exactly one of `image`, `build` and `compose`.

    With `compose`, `resources` limit its main service. Each other service has the file's sizes, at most `resources`;
    if the host can enforce it, all services together have at most twice `resources`.
    """

    kind: EnvironmentKind = EnvironmentKind.DOCKER
    image: ImageName | None = None
    build: Build | None = None
    compose: Compose | None = None
    workdir: FolderText = "/testbed"
    resources: Resources = Resources()
    grading: Reach = Reach()  # of a `TestsGoal`'s grader, set by its dataset; submissions cannot change it
    env: dict[PlainText, PlainText] = {}  # no secrets: it is stored and shown
    setup: tuple[PlainText, ...] = ()
    tools: tuple[ToolName, ...] = ()  # frameworks that run inside, mounted read-only; set at submission, per agent
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
        """Returns the spec of a separate grading environment: without frameworks, with writable files."""
        reuse = Reuse.FRESH if self.reuse is Reuse.SHARED_READONLY else self.reuse
        hosts, network = reach.allowed_hosts, reach.network
        return self.model_copy(update={"tools": (), "reuse": reuse, "network": network, "allowed_hosts": hosts})

    @property
    def label(self) -> str:
        """The image's reference, or the context's digest, as text for people."""
        if self.image is not None:
            return self.image
        if self.compose is not None:
            return f"{SEVERAL}{self.compose.context.sha256[:12]}"
        return f"build:{self.build.context.sha256[:12] if self.build else '?'}"


class JudgeName(StrEnum):
    """Graders that read the report of a test run and decide the result."""

    OWN = "own"  # MegaFlow's: the parser named by `log_parser`; skipped tests of `pass_to_pass` are accepted
    SWEBENCH_4 = "swebench-4"  # the package of that major version, by the row's repository and version
    SWEBENCH_5 = "swebench-5"  # the package of that major version, by the parser that the row names
    MULTI_SWE_BENCH = "multi-swe-bench"
    SWESMITH = "swesmith"
    EXIT_CODE = "exit-code"  # the test command's exit code: 0 is resolved


class TestsGoal(Wire):
    """G of repository datasets: named tests must pass after the agent's patch and the hidden tests are applied.

    Graded in a separate environment where the agent never ran, in this order: check that HEAD is `base_commit`, the
    agent's patch, `install_command`, the hidden tests, `build_command`, `test_command`, the judge. Reward 1.0 if the
    judge finds the task resolved, else 0.0.
    """

    __test__ = False  # not a test class of pytest
    kind: Literal["tests"] = "tests"
    base_commit: Annotated[PlainText, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z._/-]{0,199}$")]
    test_patch: PlainText = ""  # empty: the test command writes the tests itself
    install_command: PlainText = ""  # rebuilds after the patch
    build_command: PlainText = ""  # builds after the hidden tests; its output is not graded
    test_command: PlainText
    judge: JudgeName = JudgeName.OWN
    log_parser: str = "pytest"  # name of the parser, as known to the judge
    fail_to_pass: tuple[PlainText, ...]
    pass_to_pass: tuple[PlainText, ...]
    patch_path: FolderText | None = None  # the dataset's script reads the agent's patch here; None: MegaFlow applies it
    test_patch_path: FolderText | None = None  # the same for the hidden tests
    row: dict[str, Any] = {}  # other fields of the dataset's row that the judge needs


class ServiceScript(Wire):
    """A further grading script, and the service in which it runs."""

    service: PlainText
    command: PlainText


RewardNumber = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]


def _rising(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] >= bounds[1]:
        raise ValueError(f"expected the lowest reward, then the highest, found {list(bounds)}")
    return bounds


RewardRange = Annotated[tuple[RewardNumber, RewardNumber], AfterValidator(_rising)]
"""Lowest and highest reward of a task."""


class ScriptGoal(Wire):
    """G of Harbor and Terminal-Bench: a script checks the agent's result and writes a reward file.

    Graded in the agent's own environment; `tests` are copied there only after the agent has ended. With `environment`,
    graded in that separate environment instead: only `artifacts` are handed over, at the same paths. With `also`, all
    scripts must pass: the task's reward is the lowest one.
    """

    kind: Literal["script"] = "script"
    tests: Bundle
    command: PlainText = "bash /tests/test.sh"
    tests_path: PlainText = "/tests"
    logs_path: PlainText = "/logs"
    service: str | None = None  # service in which the tests run, if several; None: the agent's
    also: tuple[ServiceScript, ...] = ()  # further grading scripts, each in its service, after `command`
    environment: EnvironmentSpec | None = None  # of the verifier; None: the agent's environment
    artifacts: tuple[FolderText, ...] = ()  # files and folders copied from the agent's environment to the verifier's
    brings_tests: bool = False  # the verifier's image has the tests already
    reward_range: RewardRange | None = None  # a reward outside is invalid; None: no range stated

    @model_validator(mode="after")
    def _apart_or_in_each_service_once(self) -> ScriptGoal:
        if self.environment is not None and (self.service is not None or self.also):
            raise ValueError("expected no services that judge beside an environment of the verifier's own, found some")
        if self.environment is None and (self.artifacts or self.brings_tests):
            raise ValueError("expected `artifacts` and `brings_tests` with `environment`, found them alone")
        services = [self.service, *(one.service for one in self.also)]
        if len(set(services)) < len(services):
            raise ValueError(f"expected each service to judge once, found {services!r}")
        return self


Goal = Annotated[TestsGoal | ScriptGoal, Field(discriminator="kind")]


class PatchSolution(Wire):
    """Gold solution as a patch against the base commit. Only the agent `oracle` sees it."""

    kind: Literal["patch"] = "patch"
    patch: PlainText
    reverse: bool = False  # the dataset's patch is the bug: reverting it is the solution


class ScriptSolution(Wire):
    """Gold solution as a script in a folder."""

    kind: Literal["script"] = "script"
    files: Bundle
    command: PlainText = "bash /solution/solve.sh"
    path: PlainText = "/solution"


Solution = Annotated[PatchSolution | ScriptSolution, Field(discriminator="kind")]


class Limits(Wire):
    """Limits of one attempt."""

    environment_timeout_s: float = Field(default=900.0, gt=0, le=_MOST_S)  # image, build, start, set-up
    agent_timeout_s: float = Field(default=1800.0, gt=0, le=_MOST_S)
    grading_timeout_s: float = Field(default=900.0, gt=0, le=_MOST_S)
    command_timeout_s: float = Field(default=120.0, gt=0, le=_MOST_S)  # one command of the agent
    max_steps: int = Field(default=100, ge=1, le=_MOST_COUNT)  # the paper's interaction rounds
    max_turn_tokens: int | None = Field(default=None, ge=1, le=_MOST_COUNT)  # of one answer of the model
    context_tokens: int | None = Field(default=None, ge=1, le=_MOST_COUNT)  # prompt and answer; None: the model's limit
    budget_usd: float | None = Field(default=None, gt=0)  # of model calls
    max_attempts: int = Field(default=3, ge=1, le=20)  # infrastructure faults before "not scored"

    @property
    def lifetime_s(self) -> float:
        """Deadline from the claim to the teardown; 120 s of it are for artifacts and cleanup.

        Twice the agent's time: time that model calls wait for limits is given back, up to the same amount again. Three
        times the grading's: a broken grading is repeated, and run with the gold solution, to find whose fault it is.
        """
        return self.environment_timeout_s + 2 * self.agent_timeout_s + 3 * self.grading_timeout_s + 120.0


class AgentTask(Wire):
    """Agent task as described by a dataset or a producer: instructions, environment, grading."""

    name: str = Field(pattern=NAME)  # its id in the dataset, e.g. django__django-13251
    dataset: PlainText = "adhoc"
    description: PlainText = Field(min_length=1)  # D: the agent's instructions, verbatim
    environment: EnvironmentSpec
    goal: Goal
    solution: Solution | None = None
    limits: Limits = Limits()

    @property
    def graded_apart(self) -> bool:
        """Whether it is graded in a separate environment, only from what is copied out of the agent's."""
        return isinstance(self.goal, TestsGoal) or self.goal.environment is not None

    @property
    def verifier(self) -> EnvironmentSpec:
        """The grading environment, if separate from the agent's."""
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
    """Sampling options of the model. In every call the gateway replaces the agent's values by the values given here."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)  # of one answer
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    token_ids: bool | None = None  # request token ids and log-probabilities; set for training


REPLAY_MODEL = "replay"
"""Name of the replay engine's model: the engine selects a script by the task."""


class ModelChoice(Wire):
    """Model used by an agent. It contains no keys: `api_key_env` is the *name* of a variable."""

    name: str
    base_url: str | None = None  # None: the endpoint of the settings
    api_key_env: str | None = None
    sampling: Sampling | None = None
    side_models: tuple[str, ...] = ()  # further models that the agent may call, at the same endpoint or by their routes

    @property
    def replay(self) -> bool:
        """Whether the name means the replay engine: `replay`, `replay:RUN`, `replay:SCRIPT`, `scenario-SCRIPT`."""
        return self.name == REPLAY_MODEL or self.name.startswith((f"{REPLAY_MODEL}:", "scenario-"))


AgentArgs = dict[Annotated[PlainText, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,79}$")], ArgumentText]
"""Values of `--agent-arg KEY=VALUE`, by key."""


NOT_SUBMITTED = "not_submitted"
"""Key in `RewardRules` for every end that is a result, except `submitted`."""
RewardRules = dict[str, RewardNumber]
"""Rewards by end reason (`EndReason`, or `NOT_SUBMITTED`): part of a run's measurement or training objective."""


class TaskSpec(Wire):
    """Agent task with its agent, model and options; it is stored, hashed, and sent to the worker."""

    task: AgentTask
    agent: str
    model: ModelChoice | None = None
    mode: Mode = Mode.AUTO
    resource_class: str = "standard"
    agent_args: AgentArgs = {}  # keys are names known to the agent's adapter
    rewards: RewardRules = {}  # by end reason; override the tests' result
    record_diffs: bool = False  # store the repository's diff after each step

    def digest(self) -> str:
        """Returns the sha256 of the canonical JSON: equal specs share one row."""
        return self.digest_of(self.model_dump_json())

    @staticmethod
    def digest_of(body: str) -> str:
        """Returns the digest of a spec given as JSON."""
        return hashlib.sha256(body.encode()).hexdigest()
