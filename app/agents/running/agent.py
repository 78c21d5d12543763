"""Runs a framework as an agent, in the form that the worker calls."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from app.agents.base import AgentJob, AgentReport, ModelEndpoint
from app.agents.bridge import serve
from app.agents.framework import Ended, Framework, FrameworkCommand, FrameworkPaths, Placement, Stop
from app.agents.running.agent_home import AgentHome
from app.agents.running.clock import Clock
from app.agents.running.collecting import collect_inside, tidy
from app.agents.running.end_reason import end_text, foreign
from app.agents.running.inside import run_inside
from app.agents.running.outputs import Outputs
from app.agents.running.outside import run_outside
from app.agents.running.redact import blot
from app.agents.stream_json import tail
from app.errors import AgentFailed, DiskFull, StationError
from app.models.shell import CancelToken, Shell

log = structlog.get_logger(__name__)

_NOT_STARTED = {126: "it cannot be executed", 127: "there is no such program"}
_PROBE_S = 30.0
_NO_MODEL = ModelEndpoint("", "")


class FrameworkAgent:
    """Runs a framework, where its adapter says. One object may run any number of jobs at a time.

        process_env: variables for a process OUTSIDE beside the adapter's own, such as SSL_CERT_FILE; never a secret.

        What the process gets, below `FrameworkCommand.env`: OUTSIDE `PATH` (TOOL/bin first), `HOME`
    (`FrameworkPaths.home`), `LANG`,
        `process_env`, nothing else. INSIDE the environment's own variables, as every command there: `HOME` stays the
        user's, for what the framework runs is the task's business; an adapter that wants another says so in `env`.
    """

    needs_solution = False

    def __init__(self, framework: Framework, *, process_env: Mapping[str, str] | None = None) -> None:
        self.framework = framework
        self.name = framework.name
        self.version = framework.version
        self.needs_model = framework.needs_model
        self._process_env = dict(process_env or {})

    def check(self) -> None:
        """Install the framework if it is not there. Raises: AgentUnavailable."""
        self.framework.install()

    def run(self, job: AgentJob, shell: Shell, cancel: CancelToken) -> AgentReport:
        """Let it work on `job`; what it wrote and left is in the job's scratch folder, without the job's token.

        Raises: EnvironmentFailed, or what else the shell raised; AgentFailed: the job names no model, or the framework
        cannot be started; AgentUnavailable: it cannot be installed; AgentUnsuitable: not in this environment; DiskFull.
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
            # Told once, to the first command after it; and looked for only after one that failed. It also shows that
            # the environment lives: one that has gone is raised here, as that.
            self.out_of_memory = self.shell.run("false", timeout_s=_PROBE_S).out_of_memory
        return by, code

    def _fetch(self, command: FrameworkCommand, agent_home: AgentHome, by: Stop) -> None:
        """Also after a timeout; not when told to stop, since the environment is being ended."""
        if by is not Stop.CANCEL:
            collect_inside(self.shell, agent_home.home, self._home, first=command.results)

    def _raise_unless_started(self, ended: Ended, command: FrameworkCommand) -> None:
        said = tail(ended.stderr)
        if (why := _NOT_STARTED.get(ended.returncode)) and command.argv[0] in said:
            raise AgentFailed(
                f"agent {self.framework.name}: expected to start {command.argv[0]} in the environment; "
                f"found that {why}: {said}"
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
