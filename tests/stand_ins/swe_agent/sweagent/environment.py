"""One bash for all commands, in the folder of the repository; the tools are copied below /root first."""

import os
import selectors
import shutil
import signal
import subprocess
import time
import uuid
from pathlib import Path

ROOT = Path("/root")


class CommandTimeoutError(RuntimeError):
    pass


def _children(parent):
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            yield int(status.parent.name)


class Environment:
    def __init__(self, told):
        self._told = told
        self._bash = None

    def start(self):
        self._bash = subprocess.Popen(
            # InteractiveProgram, so that it reads ~/.bashrc, as a terminal would.
            ["/usr/bin/env", "bash", "--noediting", "-i"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PS1": "", "PS2": ""},
            start_new_session=True,
        )
        self.must("source /root/.bashrc 2>/dev/null; unset PROMPT_COMMAND; PS1=; PS2=; true")
        self.must("cd /")
        self.must(f"cd /{self._told['env.repo.repo_name']} && export ROOT=$(pwd -P)")
        if self._told.get("env.repo.reset", True):
            self.must("git fetch && git status && git restore . && git reset --hard && git clean -fdq")
        here = self.must("pwd").strip()
        for bundle in (Path(each["path"]) for each in self._told["agent.tools.bundles"]):
            there = ROOT / "tools" / bundle.name
            shutil.copytree(bundle, there)
            for program in (there / "bin").iterdir():
                program.chmod(0o755)
            self.must(f"export PATH={there}/bin:$PATH")
            if (there / "install.sh").exists():
                self.must(f"cd {there} && source install.sh")
        for name, value in self._told["agent.tools.env_variables"].items():
            self.must(f"export {name}='{value}'")
        (ROOT / ".swe-agent-env").write_text("{}")
        self.must(f"cd {here}")
        self.must("which submit")

    def must(self, command):
        output, code = self.run(command, 25)
        if code:
            raise RuntimeError(f"Command {command!r} failed ({code}): {output}")
        return output

    def run(self, command, limit_s):
        """Output and exit code. Raises: CommandTimeoutError, after which the shell is as it was before."""
        mark = f"END-{uuid.uuid4().hex}"
        self._bash.stdin.write(f"{command}\nprintf '\\n{mark} %s\\n' $?\n".encode())
        self._bash.stdin.flush()
        seen, deadline = b"", time.monotonic() + limit_s
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._bash.stdout, selectors.EVENT_READ)
            while f"{mark} ".encode() not in seen or not seen.endswith(b"\n"):
                if not waiting.select(max(0.0, deadline - time.monotonic())):
                    for child in _children(self._bash.pid):
                        os.kill(child, signal.SIGKILL)
                    self._settle(mark)
                    raise CommandTimeoutError(f"timeout after {limit_s} seconds while running command {command!r}")
                if not (chunk := os.read(self._bash.stdout.fileno(), 65536)):
                    raise RuntimeError(f"the shell ended while running {command!r}")
                seen += chunk
        output, _, code = seen.decode("utf-8", "backslashreplace").rpartition(f"{mark} ")
        return output.rstrip("\n"), int(code)

    def _settle(self, mark):
        """Read on until the command that was killed has ended."""
        seen = b""
        while f"{mark} ".encode() not in seen or not seen.endswith(b"\n"):
            seen += os.read(self._bash.stdout.fileno(), 65536)

    def close(self):
        if self._bash is not None:
            self._bash.kill()
            self._bash.communicate()
