"""Defines the base class of this repository's adapters, and the start-up file of shells of a framework inside.

Those shells must be the task's, not the framework's. A framework has its own home folder and its own variables, with
the model's key among them. An interactive bash reads `.bashrc` there first and restores the state without the
framework: the user's own home, its start-up file, and none of those variables.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from app.agents.framework import Framework
from app.agents.installation import Installer, Needs, require
from app.errors import AgentUnsuitable
from app.models.shell import Shell

BASHRC = ".bashrc"
USERS_OWN = 'if [ -r "$HOME/.bashrc" ]; then . "$HOME/.bashrc"; fi'
_LOOK_S = 30.0


class PinnedAdapter(Framework):
    """Base class of adapters. One object may serve any number of jobs at a time.

    `call_timeout_s` and `call_attempts` limit one model call of the framework. The timeout includes the time that the
    call waits at the gateway for a limit or a busy inference server.
    """

    needs_model = True
    programs: tuple[str, ...] = ("bash",)
    """Programs that it calls inside; the image must have them."""

    def __init__(self, installer: Installer, *, call_timeout_s: float = 480.0, call_attempts: int = 3) -> None:
        self._installer = installer
        self._call_timeout_s = call_timeout_s
        self._call_attempts = call_attempts

    def suits(self, shell: Shell) -> None:
        """Raises: AgentUnsuitable: another C library, another architecture, or a program is missing."""
        bundle = self.install()
        require(shell, bundle.name, Needs.of(bundle))
        names = shlex.join(self.programs)
        result = shell.run(f"for p in {names}; do command -v $p >/dev/null || echo $p; done", timeout_s=_LOOK_S)
        if missing := result.stdout.decode("utf-8", "replace").split():
            raise AgentUnsuitable(
                f"agent {self.name}: expected {', '.join(self.programs)} in the environment; found no"
                f" {', '.join(missing)}; add them to the image, or give the task to an agent that acts from outside"
            )


def bashrc(variables: Iterable[str], *, last: str = USERS_OWN) -> bytes:
    """Returns the content of `BASHRC` in the framework's home; `variables` are names that commands must not see.

    last: the last lines of the file.
    """
    return f"""\
unset {shlex.join(sorted(variables))}
HOME=$(eval "echo ~$(id -un 2>/dev/null)")
export HOME
{last}
""".encode()
