"""Defines the environment class of mini-swe-agent: it sends every command over the bridge.

Loaded by mini-swe-agent, in mini-swe-agent's own Python environment (`environment_class:
megaflow_environment.MegaFlowEnvironment`); nothing of MegaFlow can be imported here. The bridge's address comes in the
variable MEGAFLOW_BRIDGE, not in the configuration, because the trajectory contains the configuration.

The framework's own parts are unchanged: its configuration, its template variables, and its test of whether a command's
output submits the task are inherited from its local environment.
"""

import json
import os
import platform
import shlex
import socket
import struct

from minisweagent.environments.local import LocalEnvironment
from minisweagent.utils.serialize import recursive_merge

_LENGTH = struct.Struct(">I")
_SPARE_S = 60.0  # added to the command's own limit, before the bridge counts as dead


class EnvironmentLost(Exception):
    """Error: the bridge or the environment behind it is gone. Its class name becomes the trajectory's exit status."""


class MegaFlowEnvironment(LocalEnvironment):
    def execute(self, action: dict, cwd: str = "", *, timeout: int | None = None) -> dict:
        """Runs the action's command in the environment; a command that fails or times out is a result."""
        limit_s = timeout or self.config.timeout
        request = {
            "command": _in_bash(action.get("command", "")),
            "cwd": cwd or self.config.cwd or None,
            "env": self.config.env,
            "timeout_s": limit_s,
        }
        output = _observation(_ask(request, limit_s + _SPARE_S), limit_s)
        self._check_finished(output)
        return output

    def get_template_vars(self, **kwargs) -> dict:
        # The inherited method adds this process's environment variables, which do not belong to the task.
        return recursive_merge(self.config.model_dump(), platform.uname()._asdict(), kwargs)


def _in_bash(command: str) -> str:
    """Wraps `command` for a POSIX shell: run by bash if there is one, stderr merged into stdout."""
    quoted = shlex.quote(command)
    return f"exec 2>&1; if command -v bash >/dev/null; then exec bash -c {quoted}; fi; exec sh -c {quoted}"


def _observation(answer: dict, limit_s: float) -> dict:
    output = answer["output"]
    if answer["truncated"]:
        where = f"; all of it is kept for the user as {', '.join(answer['logs'])}" if answer["logs"] else ""
        output += f"\n[the middle of this output was left out because it was too long{where}]\n"
    if answer["out_of_memory"]:
        output += "\n[the environment's memory limit was reached: processes were killed for it]\n"
    if answer["exit_code"] is not None and not answer["timed_out"]:
        return {"output": output, "returncode": answer["exit_code"], "exception_info": ""}
    reason = f"the command did not end within {limit_s} seconds" if answer["timed_out"] else "the command was killed"
    return {
        "output": output,
        "returncode": -1,
        "exception_info": f"An error occurred while executing the command: {reason}",
        "extra": {"exception_type": "TimeoutExpired" if answer["timed_out"] else "Killed", "exception": reason},
    }


def _ask(request: dict, patience_s: float) -> dict:
    """Sends one request over the bridge.

    Raises: EnvironmentLost: no answer, or the answer reports that the environment is gone.
    """
    content = json.dumps(request).encode()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(patience_s)
            connection.connect(os.environ["MEGAFLOW_BRIDGE"])
            connection.sendall(_LENGTH.pack(len(content)) + content)
            with connection.makefile("rb") as stream:
                (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
                answer = json.loads(stream.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise EnvironmentLost(f"the bridge to the environment does not answer: {error}") from error
    if fault := answer.get("fault") or answer.get("error"):
        raise EnvironmentLost(fault)
    return answer
