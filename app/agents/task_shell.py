"""Finds the shell and programs that a framework inside the environment needs.

That shell must be the task's, not the framework's. A framework has a home folder of its own, and variables of its own,
the key of the model among them; an interactive bash reads `.bashrc` there first and becomes what it would be without
the framework: the user's own home, its start-up file, and none of those variables.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from app.errors import AgentUnsuitable
from app.models.shell import Shell

NAME = ".bashrc"
USERS_OWN = 'if [ -r "$HOME/.bashrc" ]; then . "$HOME/.bashrc"; fi'
_LOOK_S = 30.0


def bashrc(variables: Iterable[str], *, last: str = USERS_OWN) -> bytes:
    """What to put as `NAME` into the framework's home; `variables` are the names that commands shall not see.

    last: what the shell does then.
    """
    return f"""\
unset {shlex.join(sorted(variables))}
HOME=$(eval "echo ~$(id -un 2>/dev/null)")
export HOME
{last}
""".encode()


def require_programs(shell: Shell, agent: str, *programs: str) -> None:
    """Raises: AgentUnsuitable: one of `programs` is not on the environment's PATH."""
    wanted = shlex.join(programs)
    looked = shell.run(f"for p in {wanted}; do command -v $p >/dev/null || echo $p; done", timeout_s=_LOOK_S)
    if missing := looked.stdout.decode("utf-8", "replace").split():
        raise AgentUnsuitable(
            f"agent {agent}: expected {', '.join(programs)} in the environment; found no {', '.join(missing)}; "
            "add them to the image, or give the task to an agent that acts from outside"
        )
