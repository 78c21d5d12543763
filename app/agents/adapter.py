"""The base class of this repository's adapters, and the shell that a framework inside the environment has.

That shell must be the task's, not the framework's. A framework has a home folder of its own, and variables of its own,
the key of the model among them; an interactive bash reads `.bashrc` there first and becomes what it would be without
the framework: the user's own home, its start-up file, and none of those variables.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from app.agents.framework import Framework
from app.agents.installation import Installer, require
from app.errors import AgentUnsuitable
from app.models.shell import Shell

BASHRC = ".bashrc"
USERS_OWN = 'if [ -r "$HOME/.bashrc" ]; then . "$HOME/.bashrc"; fi'
_LOOK_S = 30.0


class PinnedAdapter(Framework):
    """One object may serve any number of jobs at a time.

    `call_timeout_s` and `call_attempts` bound one call of the model as the framework makes it: what a limit or a busy
    engine makes it wait at the gateway is part of the first.
    """

    needs_model = True
    programs: tuple[str, ...] = ("bash",)
    """What it calls inside, which the image has to have."""

    def __init__(self, installer: Installer, *, call_timeout_s: float = 480.0, call_attempts: int = 3) -> None:
        self._installer = installer
        self._call_timeout_s = call_timeout_s
        self._call_attempts = call_attempts

    def suits(self, shell: Shell) -> None:
        """Raises: AgentUnsuitable: another C library, another architecture, or a program is missing."""
        require(shell, self.install())
        wanted = shlex.join(self.programs)
        looked = shell.run(f"for p in {wanted}; do command -v $p >/dev/null || echo $p; done", timeout_s=_LOOK_S)
        if missing := looked.stdout.decode("utf-8", "replace").split():
            raise AgentUnsuitable(
                f"agent {self.name}: expected {', '.join(self.programs)} in the environment; found no"
                f" {', '.join(missing)}; add them to the image, or give the task to an agent that acts from outside"
            )


def bashrc(variables: Iterable[str], *, last: str = USERS_OWN) -> bytes:
    """What to put as `BASHRC` into the framework's home; `variables` are the names that commands shall not see.

    last: what the shell does then.
    """
    return f"""\
unset {shlex.join(sorted(variables))}
HOME=$(eval "echo ~$(id -un 2>/dev/null)")
export HOME
{last}
""".encode()
