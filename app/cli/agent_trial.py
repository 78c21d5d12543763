"""`megaflow agents check`: one agent on a toy task, in a real environment, with a scripted model in this process."""

from __future__ import annotations

import hashlib
import io
import tarfile
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from app.agents.framework import Framework, Placement
from app.agents.trial import WORKDIR, NeverCancelled, Trial, TrialStage, write_scripts
from app.environments.contract import Environment, Tags
from app.errors import MegaFlowError, ModelEndpointUnavailable, UnknownName
from app.models.endings import EndReason
from app.models.spec import Build, Bundle, EnvironmentKind, EnvironmentSpec, Limits
from app.settings import Settings

_KINDS = (EnvironmentKind.LOCAL, EnvironmentKind.OCI, EnvironmentKind.DOCKER)
_PREPARE_S = 900.0
_ENGINE_START_S = 30.0
_TAIL_CHARS = 1500


@dataclass(frozen=True, slots=True)
class Where:
    """In what kind of environment the trial takes place. `image` is not for `local`."""

    kind: EnvironmentKind
    image: str

    @classmethod
    def of(cls, kind: str, image: str) -> Where:
        """Raises: UnknownName."""
        if kind not in {known.value for known in _KINDS}:
            raise UnknownName.of("kind of environment", kind, [known.value for known in _KINDS])
        return cls(EnvironmentKind(kind), image)


@dataclass
class TrialFindings:
    """What came of it, and how long each part took, in seconds."""

    agent: str
    version: str
    ok: bool = False
    times_s: dict[str, float] = field(default_factory=dict)
    end_reason: str = ""
    detail: str = ""
    solved: bool = False
    turns: int | None = None
    left: list[str] = field(default_factory=list)
    log_tail: str = ""

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.times_s[what] = round(time.monotonic() - begun, 2)

    def take(self, trial: Trial) -> None:
        report = trial.report
        self.end_reason, self.detail = report.end_reason.value, report.detail
        self.solved, self.turns, self.left = trial.solved, report.steps, list(trial.untracked)
        self.ok = trial.solved and report.end_reason is EndReason.SUBMITTED and not trial.untracked
        if report.log is not None and report.log.is_file():
            self.log_tail = report.log.read_bytes()[-_TAIL_CHARS:].decode("utf-8", "replace")


def checked(
    framework: Framework, settings: Settings, where: Where, timeout_s: float, tell: Callable[[str], None]
) -> TrialFindings:
    """A framework that cannot be tried is a finding, too; `tell` hears what is being done."""
    found = TrialFindings(framework.name, framework.version)
    with tempfile.TemporaryDirectory(prefix="megaflow-check-", ignore_cleanup_errors=True) as folder:
        try:
            tell("installing")
            with found.timed("install"):
                framework.install()
            tell("starting a scripted model")
            with _engine(Path(folder) / "scenes") as base_url:
                tell("preparing an environment")
                with _environment(framework, settings, where, Path(folder), found) as environment:
                    tell("working")
                    found.take(_played(framework, environment, where, base_url, Path(folder), timeout_s, found))
        except MegaFlowError as error:
            found.detail = f"{type(error).__name__}: {error}"
    return found


def _played(
    framework: Framework,
    environment: Environment,
    where: Where,
    base_url: str,
    folder: Path,
    timeout_s: float,
    found: TrialFindings,
) -> Trial:
    from app.agents.running import FrameworkAgent
    from app.environments import tool_inside
    from app.environments.networks import MODEL_PORT, open_model_egress

    scratch = folder / "scratch"
    scratch.mkdir()
    limits = Limits(agent_timeout_s=timeout_s, max_steps=10)
    if framework.placement is Placement.OUTSIDE:
        stage, egress = TrialStage(environment, base_url), None
    else:
        bundle = framework.install()
        shared = where.kind is EnvironmentKind.LOCAL  # with this host's loopback
        inside_url, egress = open_model_egress(environment.forward, base_url, port=0 if shared else MODEL_PORT)
        tools = {bundle.name: tool_inside(where.kind, bundle.name, bundle.folder)}
        stage = TrialStage(environment, base_url, inside_url, tools)
    try:
        stage.prepare()
        with found.timed("work"):
            return stage.play(FrameworkAgent(framework), "solve", scratch, limits, NeverCancelled())
    finally:
        if egress is not None:
            egress.close()


# --- The scripted model ---------------------------------------------------------------------------------------------


@contextmanager
def _engine(folder: Path) -> Iterator[str]:
    """The replay engine in a thread: its base URL. Raises: ModelEndpointUnavailable: it does not start."""
    import uvicorn

    from app.model_service.replay.server import create_app

    write_scripts(folder)
    config = uvicorn.Config(create_app([folder]), log_level="error", access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="scripted-model", daemon=True)
    thread.start()
    try:
        patience_ends = time.monotonic() + _ENGINE_START_S
        while not server.started:
            if not thread.is_alive() or time.monotonic() > patience_ends:
                raise ModelEndpointUnavailable("expected the scripted model to start; found that it does not")
            time.sleep(0.02)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


# --- The environment ------------------------------------------------------------------------------------------------


@contextmanager
def _environment(
    framework: Framework, settings: Settings, where: Where, folder: Path, found: TrialFindings
) -> Iterator[Environment]:
    """Raises: StationError: it cannot be made."""
    from app.environments import provider_for

    local = where.kind is EnvironmentKind.LOCAL
    home = settings.model_copy(update={"home": folder / "home"}) if local else settings  # of it nothing is to stay
    tools = (framework.name,) if framework.placement is Placement.INSIDE else ()
    recipe = _recipe()
    source: dict[str, object] = {"image": where.image}
    if local:
        bundle = Bundle(sha256=hashlib.sha256(recipe).hexdigest(), size_bytes=len(recipe))
        source = {"build": Build(context=bundle)}
    spec = EnvironmentSpec.model_validate({"kind": where.kind, "workdir": WORKDIR, "tools": tools, **source})
    provider = provider_for(where.kind, home, lambda _: recipe, tools=lambda _: framework.install().folder)
    with found.timed("environment"):
        provider.prepare_image(spec, timeout_s=_PREPARE_S)
        environment = provider.create(spec, _tags(settings), timeout_s=_PREPARE_S)
    try:
        yield environment
    finally:
        environment.destroy()


def _tags(settings: Settings) -> Tags:
    """Without an attempt: if this process is killed, the sweeper removes the environment at its deadline."""
    return Tags.without_attempt(settings.installation, uuid.uuid4(), time.time() + 3600)


def _recipe() -> bytes:
    """A build context that needs nothing."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("setup.sh"), io.BytesIO())
    return buffer.getvalue()
