"""Gets an attempt's environments from the pool, waits for a container engine that is down, releases them at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import structlog

from app.environments.contract import Environment, EnvironmentProvider, Route, Tags, Times, noting
from app.environments.runtimes.setup import watched_setup
from app.errors import ArtifactMissing, EngineUnavailable, InputMissing, MegaFlowError, StationError
from app.images import pull_source
from app.ledger import graphs
from app.ledger.environment_times import FAILED
from app.live_shell import COMMAND, LiveShells, ShellRequest
from app.models.outcome import Phase
from app.models.shell import InteractiveProgram, Shell
from app.models.spec import EnvironmentSpec, Mode, Reuse
from app.workers.attempt_context import AttemptContext
from app.workers.retry import retrying
from app.workers.services import WorkerServices
from app.workers.terminal import SET_UP

log = structlog.get_logger()

T = TypeVar("T")

_ENDS = ("reset", "teardown")
"""Phases that clean up an earlier or failed environment: not part of the wait for this one."""
_OF_SEVERAL = {"network": "create", "services": "start"}
"""Phases of multi-container environments: the phase to count them under when the environment failed to start."""


@contextmanager
def environment_for(context: AttemptContext, purpose: str) -> Iterator[Environment]:
    """Gives an environment for the block, then recycles or ends it; ends it at once when the attempt must stop."""
    claimed, services = context.claimed, context.services
    spec, limits = claimed.spec.task.environment, claimed.spec.task.limits
    if purpose.startswith("grading"):
        spec = claimed.spec.task.verifier
    with _asking(context, spec, purpose) as asking, watched_setup(lambda shell: context.recorded(shell, SET_UP)):
        with asking.spent.measure("image"):
            provider, image = _awaiting_engine(context, lambda: _provider(context, spec))
        image_s = asking.spent.phases["image"]
        if purpose == "agent":
            context.record_phase(Phase.IMAGE_READY, image=image)
        since = time.time()
        context.raise_if_stopped()
        shares = spec.reuse is Reuse.SHARED_READONLY
        reuse = claimed.mode is Mode.PERSISTENT and (spec.reuse is Reuse.RECYCLED or shares)
        acquire = partial(
            services.pool.acquire, provider, spec, _tags(context), image, timeout_s=limits.environment_timeout_s
        )
        environment, origin = _awaiting_engine(context, lambda: acquire(allow_reuse=reuse))
    alone = not (reuse and shares)  # events in a shared environment cannot be attributed to one attempt
    image_by = asking.arrivals.longest.value
    summary = context.teardown[purpose] = {"id": environment.id, "origin": origin.value, "image_by": image_by}
    with ExitStack() as at_end:
        at_end.callback(_let_go, context, environment, purpose, reuse=reuse, alone=alone)
        summary |= _came(environment, image_s, ready_s=asking.waited_s)
        at_end.callback(context.token.on_cancel(environment.destroy))
        if alone:
            context.limits_met.watch(environment)
            at_end.enter_context(_sampled(context, environment, purpose, since))
        _keep_logs(context, environment, alone=alone)
        yield environment


def put_inputs(context: AttemptContext, shell: Shell) -> None:
    """Writes the artifacts of earlier tasks that are inputs of this task as files into the environment.

    Raises: InputMissing: an artifact does not exist; ArtifactStoreUnavailable; DatabaseUnavailable; errors of `put`.
    """
    retry = retrying(context.services.settings.lease_s)
    for needed in retry(graphs.inputs, context.services.database, context.claimed.run_id):
        what = f"input missing: {needed.kind.value} of task {needed.task_name} ({needed.task_id}) for {needed.path}"
        if needed.key is None:
            raise InputMissing(f"{what}: {needed.missing or 'that task left none'}")
        try:
            content = context.services.store.get(needed.key)
        except ArtifactMissing as error:
            raise InputMissing(f"{what}: {error}") from error
        shell.put(needed.path, content)


@contextmanager
def live_shells(context: AttemptContext, environment: Environment) -> Iterator[None]:
    """Lets users open recorded shells in the environment during the block; does nothing if it is shared."""
    claimed = context.claimed
    if claimed.mode is Mode.PERSISTENT and claimed.spec.task.environment.reuse is Reuse.SHARED_READONLY:
        yield
        return

    def program(request: ShellRequest) -> InteractiveProgram:
        shell = context.recorded(environment, f"shell of {request.user_name}")
        variables = {"TERM": "xterm-256color"}
        return shell.stream(COMMAND, env=variables, tty=True, rows=request.rows, columns=request.columns)

    shells = LiveShells(context.services.settings, claimed.attempt_id, program)
    context.token.on_wake = shells.look
    try:
        yield
    finally:
        context.token.on_wake = None
        shells.close()
        context.journal.shells += shells.users


@contextmanager
def _sampled(context: AttemptContext, environment: Environment, purpose: str, since: float) -> Iterator[None]:
    with context.services.sampler.sampling(environment, since) as series:
        context.journal.samples[purpose] = series
        yield


@dataclass(frozen=True, slots=True)
class _Asking:
    """Times and image sources of an attempt's wait for an environment."""

    spent: Times
    arrivals: pull_source.PullSources
    begun: float = field(default_factory=time.monotonic)

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.begun


@contextmanager
def _asking(context: AttemptContext, spec: EnvironmentSpec, purpose: str) -> Iterator[_Asking]:
    with pull_source.noted() as arrivals, noting() as spent:
        asking = _Asking(spent, arrivals)
        try:
            yield asking
        except BaseException:
            context.teardown[purpose] = {"kind": _kind(context, spec), **_never_came(asking)}
            raise


def _kind(context: AttemptContext, spec: EnvironmentSpec) -> str:
    with suppress(MegaFlowError):
        provider = context.services.environments(spec.kind)
        return provider.kind_of(spec)
    return spec.kind.value


def _never_came(asking: _Asking) -> dict[str, Any]:
    """Describes an environment that failed to start, like `_came`: the phases that had begun."""
    ready_s, phases = asking.waited_s, dict[str, float]()
    for phase, took_s in asking.spent.phases.items():
        if phase not in _ENDS:
            name = _OF_SEVERAL.get(phase, phase)
            phases[name] = round(phases.get(name, 0.0) + took_s, 4)
    phases["other"] = round(max(0.0, ready_s - sum(phases.values())), 4)
    image_by = asking.arrivals.longest.value
    return {"path": FAILED, "image_by": image_by, "phases": phases, "ready_s": round(ready_s, 4)}


def _let_go(context: AttemptContext, environment: Environment, purpose: str, *, reuse: bool, alone: bool) -> None:
    context.limits_met.leave(environment)
    if alone:
        environment.keep_logs(None)
    reuse = reuse and not context.token.is_set()
    context.teardown[purpose]["reset"] = _give_back(context.services, environment, reuse=reuse)
    context.teardown[purpose]["after"] = environment.describe().get("phases", {})


def _came(environment: Environment, image_s: float, *, ready_s: float) -> dict[str, Any]:
    """Describes how the environment started (path) and the seconds waited per phase; `other`: between the phases."""
    about = environment.describe()
    phases = dict(about.get("phases", {}))
    phases["image"] = round(phases.get("image", 0.0) + image_s, 4)
    phases["other"] = round(max(0.0, ready_s - sum(phases.values())), 4)
    kind = {"kind": about["kind"]} if "kind" in about else {}
    return {
        **kind,
        "path": about.get("path", Route.COLD.value),
        "phases": phases,
        "ready_s": round(ready_s, 4),
    }


def _keep_logs(context: AttemptContext, environment: Environment, *, alone: bool) -> None:
    """Keeps the environment's long outputs as the attempt's. Those of the agent's framework are kept in any case."""
    if alone and environment.keep_logs(context.logs):
        context.evidence.command_logs(context.logs)
    else:
        why = "an environment of this kind keeps none" if alone else "the environment was shared with others"
        context.evidence.command_logs(context.logs, why=why)


def _provider(context: AttemptContext, spec: EnvironmentSpec) -> tuple[EnvironmentProvider, str]:
    services = context.services
    provider = services.environments(spec.kind, context.semaphore)
    return provider, provider.prepare_image(spec, timeout_s=context.claimed.spec.task.limits.environment_timeout_s)


def _awaiting_engine(context: AttemptContext, once: Callable[[], T]) -> T:
    """Retries while the engine restarts. This costs time but no attempt: no environment exists yet to be lost."""
    retry = retrying(context.services.settings.engine_patience_s, of=EngineUnavailable, hurried=context.token.is_set)
    begun = time.monotonic()
    try:
        return retry(once)
    except EngineUnavailable:
        context.raise_if_stopped()
        raise
    finally:
        if retry.statistics.get("attempt_number", 1) > 1:
            context.semaphore.waited["engine"] = context.semaphore.waited.get("engine", 0.0) + time.monotonic() - begun


def _give_back(services: WorkerServices, environment: Environment, *, reuse: bool) -> dict[str, Any] | None:
    """Resets and keeps the environment, or ends it. An error must not change the outcome: the sweeper ends it later."""
    try:
        proof = services.pool.release(environment, reuse=reuse)
    except StationError as error:
        log.warning("environment.not_given_back", environment=environment.id, error=str(error))
        return {"error": str(error)}
    if proof is None:
        return None
    return {**asdict(proof), "left": list(proof.left[:20]), "took_s": round(proof.took_s, 4)}


def _tags(context: AttemptContext) -> Tags:
    claimed = context.claimed
    return Tags(
        installation=context.services.settings.installation,
        instance_id=claimed.instance_id,
        run_id=claimed.run_id,
        task_id=claimed.task_id,
        attempt_id=claimed.attempt_id,
        deadline_unix_s=claimed.deadline_at.timestamp(),
    )
