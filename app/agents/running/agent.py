"""Runs a framework as an agent, in the form that the worker calls."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from app.agents.base import Agent, AgentJob, AgentReport, ModelEndpoint
from app.agents.bridge import serve
from app.agents.framework import AgentEnding, Ended, Framework, FrameworkCommand, FrameworkPaths, Placement, Stop
from app.agents.running.clock import Clock
from app.agents.running.collecting import collect_inside, tidy
from app.agents.running.inside import AgentHome, run_inside
from app.agents.running.outputs import Outputs
from app.agents.running.outside import run_outside
from app.agents.running.redact import blot
from app.agents.stream_json import tail
from app.errors import AgentFailed, DiskFull, MegaFlowError, StationError
from app.models.endings import EndReason
from app.models.shell import CancelToken, Shell

_CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGBUS, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS}
)
"""Signals that a program causes itself; every other signal is sent by another process."""
_DETAIL_CHARS = 2000
_MOST_STEPS = 1 << 31


def foreign(returncode: int) -> bool:
    """Whether it was ended by a signal from another process."""
    return returncode < 0 and -returncode in signal.valid_signals() and -returncode not in _CRASHES


def end_text(framework: Framework, ended: Ended, *, out_of_memory: bool = False) -> AgentEnding:
    """Returns the end reason. For INSIDE, the environment is known to live.

    There, damage to the framework's processes by the agent's commands counts as the agent's own doing: if it were a
    fault of MegaFlow, the model could force a retry of any attempt. When the kernel kills for the environment's memory,
    the environment reports it.
    """
    if ended.by is Stop.CANCEL:
        return AgentEnding(EndReason.CANCELLED, "stopped on request")
    if ended.by is Stop.TIMEOUT:
        return AgentEnding(EndReason.AGENT_TIMEOUT, "still working when its time was up")
    inside = framework.placement is Placement.INSIDE
    if foreign(ended.returncode):
        if out_of_memory:
            return AgentEnding(EndReason.RESOURCE_LIMIT, "killed when the environment's memory limit was reached")
        reason = EndReason.AGENT_ERROR if inside else EndReason.INFRASTRUCTURE
        where = "in its environment" if inside else "from outside"
        detail = f"killed {where}, by signal {-ended.returncode}: {tail(ended.stderr)}"
        return AgentEnding(reason, _text(detail.rstrip(": ")))
    try:
        ending = _shortened(framework.ending(ended))
    except MegaFlowError:
        raise
    except Exception as error:  # a framework may write anything, also what its adapter does not expect
        log.exception("agent.ending_not_understood", agent=framework.name)
        detail = f"its ending cannot be understood: {error!r}; {tail(ended.stderr)}"
        return AgentEnding(EndReason.AGENT_ERROR, _text(detail))
    if inside and ending.reason is EndReason.INFRASTRUCTURE:
        return AgentEnding(EndReason.AGENT_ERROR, ending.detail, ending.steps, ending.usage)
    return ending


def _shortened(ending: AgentEnding) -> AgentEnding:
    """Removes an invalid number of steps: it is information for people and does not change the end reason."""
    steps: object = ending.steps
    if steps is not None and not _whole(steps):
        log.warning("agent.steps_not_understood", found=f"{steps!r:.80}")
        steps = None
    return AgentEnding(EndReason(ending.reason), _text(ending.detail), steps, ending.usage)  # type: ignore[arg-type]


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_STEPS


def _text(value: object) -> str:
    """Returns a text that the database accepts."""
    return str(value).encode("utf-8", "replace").decode().replace("\0", "")[:_DETAIL_CHARS]


log = structlog.get_logger(__name__)

_NOT_STARTED = {126: "it cannot be executed", 127: "there is no such program"}
_PROBE_S = 30.0
_NO_MODEL = ModelEndpoint("", "")


class FrameworkAgent(Agent):
    """Runs a framework, at the placement of its adapter. One object may run any number of jobs at a time.

    process_env: variables for a process OUTSIDE in addition to the adapter's own, such as SSL_CERT_FILE; never a
    secret.

    The process gets, below `FrameworkCommand.env`: OUTSIDE `PATH` (TOOL/bin first), `HOME` (`FrameworkPaths.home`),
    `LANG` and `process_env`, nothing else. INSIDE the environment's own variables, as every command there: `HOME` stays
    the user's, for the commands of the framework belong to the task. An adapter that needs another sets it in `env`.
    """

    def __init__(self, framework: Framework, *, process_env: Mapping[str, str] | None = None) -> None:
        self.framework = framework
        self.name = framework.name
        self.version = framework.version
        self.needs_model = framework.needs_model
        self._process_env = dict(process_env or {})

    def check(self) -> None:
        """Installs the framework if it is missing. Raises: AgentUnavailable."""
        self.framework.install()

    def run(self, job: AgentJob, shell: Shell, cancel: CancelToken) -> AgentReport:
        """Runs the framework on `job`. Its outputs and files are in the job's scratch folder, with the token redacted.

        Raises: EnvironmentFailed, or other shell errors; AgentFailed: the job names no model, or the framework cannot
        be started; AgentUnavailable: it cannot be installed; AgentUnsuitable: not in this environment; DiskFull.
        """
        try:
            scratch = job.scratch.absolute()
            (scratch / "home").mkdir(parents=True, exist_ok=True)
            one = _Run(self.framework, job, shell, cancel, scratch)
            outside = self.framework.placement is Placement.OUTSIDE
            ended = one.outside(self._process_env) if outside else one.inside()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DiskFull(f"agent {self.name}: expected to write in {job.scratch}; found {error}") from error
        ending = end_text(self.framework, ended, out_of_memory=one.out_of_memory)
        log.info("agent.ended", agent=self.name, reason=ending.reason.value, returncode=ended.returncode)
        return AgentReport(
            end_reason=ending.reason,
            detail=ending.detail,
            log=scratch / "agent.log",
            files=ended.home if any(ended.home.iterdir()) else None,
            steps=ending.steps,
            usage=dict(ending.usage),
        )


@dataclass
class _Run:
    framework: Framework
    job: AgentJob
    shell: Shell
    cancel: CancelToken
    scratch: Path
    out_of_memory: bool = False

    @property
    def _home(self) -> Path:
        return self.scratch / "home"

    def outside(self, process_env: Mapping[str, str]) -> Ended:
        bundle, model = self.framework.install(), self._model(self.job.model, "for task")
        with serve(self.shell, default_timeout_s=self.job.limits.command_timeout_s) as bridge:
            tool, home = str(bundle.folder), str(self._home)
            place = FrameworkPaths(tool, home, self.job.workdir, model, bridge=str(bridge.address))
            command = self.framework.command(self.job, place)
            for name, content in command.files.items():
                _write_below(self._home, name, content)
            path = f"{tool}/bin:/usr/local/bin:/usr/bin:/bin"
            basis = {"PATH": path, "HOME": home, "LANG": "C.UTF-8"}
            ended = self._results(
                lambda outputs: run_outside(
                    command.argv,
                    env={**basis, **process_env, **command.env},
                    cwd=home,
                    stdin=command.stdin,
                    outputs=outputs,
                    clock=self._clock(),
                    cancel=self.cancel,
                ),
                lambda by: tidy(self._home),
            )
        if bridge.fault is not None and ended.by is Stop.ITSELF:
            raise bridge.fault
        return ended

    def inside(self) -> Ended:
        bundle, model = self.framework.install(), self._model(self.job.inside(), "that can be reached from inside")
        tool = self.job.tools_inside.get(bundle.name)
        if tool is None:
            raise AgentFailed(
                f"agent {self.framework.name}: expected its bundle {bundle.name!r} in the environment; found "
                f"{', '.join(self.job.tools_inside) or 'none'}; name it in the environment's `tools`"
            )
        try:
            self.framework.suits(self.shell)
            agent_home = AgentHome.made(self.shell, self.job.workdir)
            command = self.framework.command(self.job, FrameworkPaths(tool, agent_home.home, self.job.workdir, model))
            agent_home.furnish(self.shell, command)
            ended = self._results(
                lambda outputs: self._run_inside(command, agent_home, outputs),
                lambda by: self._fetch(command, agent_home, by),
            )
        except StationError:
            if not self.cancel.is_set():
                raise
            return self._cancelled()
        if ended.by is Stop.ITSELF:
            self._raise_unless_started(ended, command)
        return ended

    def _run_inside(self, command: FrameworkCommand, agent_home: AgentHome, outputs: Outputs) -> tuple[Stop, int]:
        by, code = run_inside(command, agent_home, self.shell, outputs=outputs, clock=self._clock(), cancel=self.cancel)
        if by is Stop.ITSELF and foreign(code):
            # Reported once, to the first command after it, and checked only after a failure. This also proves that the
            # environment lives: a lost one raises here.
            self.out_of_memory = self.shell.run("false", timeout_s=_PROBE_S).out_of_memory
        return by, code

    def _fetch(self, command: FrameworkCommand, agent_home: AgentHome, by: Stop) -> None:
        """Collects the files, also after a timeout; not after a cancel, since the environment is being ended."""
        if by is not Stop.CANCEL:
            collect_inside(self.shell, agent_home.home, self._home, first=command.results)

    def _raise_unless_started(self, ended: Ended, command: FrameworkCommand) -> None:
        errors = tail(ended.stderr)
        if (why := _NOT_STARTED.get(ended.returncode)) and command.argv[0] in errors:
            raise AgentFailed(
                f"agent {self.framework.name}: expected to start {command.argv[0]} in the environment; "
                f"found that {why}: {errors}"
            )

    def _cancelled(self) -> Ended:
        for name in ("stdout", "stderr", "agent.log"):
            (self.scratch / name).touch()
        return Ended(Stop.CANCEL, -signal.SIGKILL, self.scratch / "stdout", self.scratch / "stderr", self._home)

    def _model(self, model: ModelEndpoint | None, which: str) -> ModelEndpoint:
        if not self.framework.needs_model:
            return _NO_MODEL
        if model is None:
            raise AgentFailed(
                f"agent {self.framework.name}: expected a model {which} {self.job.task_name!r}; found none; "
                "name one, and for an agent that acts inside a network that leads to it"
            )
        return model

    def _clock(self) -> Clock:
        return Clock(self.job.limits.agent_timeout_s, self.job.waited_s)

    def _results(self, run: Callable[[Outputs], tuple[Stop, int]], collect: Callable[[Stop], None]) -> Ended:
        outputs = Outputs(self.scratch, self.job.logs)
        try:
            by, returncode = run(outputs)
            collect(by)
        finally:
            try:
                outputs.close()
            finally:
                blot(self.job, [*outputs.files, self._home])
        return Ended(by, returncode, outputs.stdout.file, outputs.stderr.file, self._home)


def _write_below(home: Path, name: str, content: bytes) -> None:
    file = (home / name).resolve()
    if not file.is_relative_to(home.resolve()) or file == home.resolve():
        raise AgentFailed(f"expected the name of a file below the framework's home; found {name!r}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    file.chmod(0o600)
