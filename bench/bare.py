"""The peer: the same commands by plain `docker run`, with nobody in between. Two ways of counting its containers.

*One container*: gold patch, hidden tests and the test command in one container, as the leanest script would do it.
*Two containers*: one where the gold patch is applied and taken out as a diff, and a second, clean one in which that
diff is graded, as MegaFlow does it so that nothing an agent leaves can reach its grading.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import dataclass

from app.environments.runtimes.docker.provider import CAP_DROP
from app.models.spec import AgentTask, PatchSolution, TestsGoal

_LABEL = "megaflow.bench=bare"
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Bare:
    """One task as bare commands. `image` is the id of an image that the engine has."""

    task: AgentTask
    image: str
    engine_url: str

    def one_container(self) -> None:
        """Raises: RuntimeError: its tests did not pass."""
        self._run([_apply(self._gold), _apply(self._tests), self._command])

    def two_containers(self) -> None:
        """Raises: RuntimeError: its tests did not pass."""
        patch = self._run([_apply(self._gold), "git add --all", "git diff --cached"])
        self._run([_apply(patch), _apply(self._tests), self._command])

    @property
    def _gold(self) -> str:
        assert isinstance(self.task.solution, PatchSolution)
        return self.task.solution.patch

    @property
    def _goal(self) -> TestsGoal:
        assert isinstance(self.task.goal, TestsGoal)
        return self.task.goal

    @property
    def _tests(self) -> str:
        return self._goal.test_patch

    @property
    def _command(self) -> str:
        return f"bash -c {shlex.quote(self._goal.test_command)} </dev/null"

    def _run(self, steps: list[str]) -> str:
        done = subprocess.run(  # noqa: S603 (our own command line)
            [*self._docker_run(), "/bin/sh", "-ec", "\n".join(steps)],
            env={**os.environ, "DOCKER_HOST": self.engine_url},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"bare docker run left with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        return done.stdout

    def _docker_run(self) -> list[str]:
        """The limits and refusals of MegaFlow's own environments (`DockerProvider._limits`)."""
        spec = self.task.environment
        resources = spec.resources
        cpus = min(resources.cpus, os.cpu_count() or 1)
        memory = str(resources.memory_bytes)
        options = [
            "--rm", "--init", "--network", "none", "--label", _LABEL, "--log-driver", "none", "--ipc", "private",
            "--cpus", f"{cpus:g}", "--memory", memory, "--memory-swap", memory, "--pids-limit", str(resources.pids),
            "--security-opt", "no-new-privileges", "--sysctl", "net.ipv4.ip_unprivileged_port_start=0",
            "--no-healthcheck", "--workdir", spec.workdir, "--entrypoint", "",
        ]  # fmt: skip
        drops = [part for capability in CAP_DROP for part in ("--cap-drop", capability)]
        return ["docker", "run", *options, *drops, self.image]


def _apply(patch: str) -> str:
    return f"git apply <<'END-OF-PATCH'\n{patch.rstrip(chr(10))}\nEND-OF-PATCH"
