"""Runs a task's test command and brings its output over the session's stream, between markers with a secret."""

from __future__ import annotations

import json
import re
import secrets
import time
from dataclasses import dataclass, field

from app.errors import EnvironmentFailed, GradingFailed
from app.models.shell import InteractiveProgram, Shell, left_out

_MOST_OUTPUT_BYTES = 32 << 20
_LOOK_S = 1.0
_AFTER_END_S = 1.0  # for the exit of the program; what the tests left in the background may keep its output open
_PROBE_S = 60.0
_STEP_KEPT = 8000  # characters of what a step before the tests printed
_HEADER = "megaflow-report"

# The marker comes over stdin: in an argument or a variable every program inside could read it.
# So does the command: a file of it could be written to while the shell reads it. An argument holds 128 KiB.
_RUN = (
    "IFS= read -r nonce && command=$(cat) || exit 99; shell=sh; command -v bash >/dev/null 2>&1 && shell=bash; "
    'printf "%s\\n" ">>>>> MegaFlow $nonce start"; '
    'if [ "$(printf %s "$command" | wc -c)" -lt 120000 ]; then "$shell" -c "$command" test.sh </dev/null 2>&1; '
    "status=$?; "
    'else folder=$(mktemp -d) && printf "%s\\n" "$command" >"$folder/test.sh" || exit 99; '
    '"$shell" "$folder/test.sh" </dev/null 2>&1; status=$?; rm -rf "$folder"; fi; '
    'printf "\\n%s\\n" ">>>>> MegaFlow $nonce end $status"; exit "$status"'
)
_STEP = (
    'folder=$(mktemp -d) && cat >"$folder/step.sh" || exit 99; '
    "shell=sh; command -v bash >/dev/null 2>&1 && shell=bash; "
    '"$shell" "$folder/step.sh" </dev/null 2>&1; status=$?; rm -rf "$folder"; exit "$status"'
)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a command before the tests. Its failure is no verdict: harnesses go on, and so do we."""

    name: str
    exit_code: int | None  # None: killed for its time
    output: str
    """The end of it."""


@dataclass(frozen=True, slots=True)
class TestRun:
    """One run of a test command. `output` is all that came over the stream, with the markers."""

    __test__ = False  # not a test class, whatever pytest thinks of the name
    nonce: str
    output: bytes
    exit_code: int | None  # of the test command; None: it has no end
    timed_out: bool = False
    out_of_memory: bool = False
    steps: tuple[StepResult, ...] = ()
    cut_short: bool = False  # ended for its silence, before its time; then `timed_out`, too
    rule: str | None = None  # what makes a resolved verdict suspect; empty: nothing; None: an earlier release's report
    control: str = ""  # the test that must be reported as failed (`control_test`); empty: there was none

    @property
    def judged(self) -> str:
        """What is between the first start and the last end of our markers; all that follows where there is no end."""
        after = self.output.decode("utf-8", "replace").partition(f"{_start(self.nonce)}\n")[2]
        return after if self.exit_code is None else after.rpartition(f"\n{_end(self.nonce)} ")[0]

    @property
    def is_cut(self) -> bool:
        """Whether the middle of its output was left out."""
        return len(self.output) > _MOST_OUTPUT_BYTES

    @property
    def broken_off(self) -> bool:
        """The command's shell was killed by what ran in it: neither its end nor our limit was reached."""
        return self.exit_code is None and not self.timed_out

    @property
    def unended(self) -> bool:
        """It has no end, and not for want of memory, which is the task's own limit."""
        return self.exit_code is None and not self.out_of_memory

    def report(self) -> bytes:
        """The run as it is kept: a line of facts, the ends of the steps, the output. `read_report` reads it."""
        facts = {
            "nonce": self.nonce,
            "exit_code": self.exit_code,
            "timed_out": self.timed_out,
            "out_of_memory": self.out_of_memory,
            "rule": self.rule,
            "control": self.control,
        }
        steps = "".join(f"--- {one.name}: {_ended(one)} ---\n{one.output}\n" for one in self.steps)
        if self.control:
            steps += f"--- control: {self.control}, a copy of a hidden test, must be reported as failed ---\n"
        return f"{_HEADER} {json.dumps(facts)}\n{steps}".encode("utf-8", "replace") + self.output


def read_report(report: bytes) -> TestRun:
    """A kept run, to be judged again; its steps are left out.

    Raises: GradingFailed: it is no such report.
    """
    first, _, output = report.partition(b"\n")
    head, _, facts = first.decode("utf-8", "replace").partition(" ")
    try:
        if head != _HEADER:
            raise ValueError("another first line")
        return TestRun(output=output, **json.loads(facts))
    except (ValueError, TypeError) as error:
        raise GradingFailed(f"expected the report of a test run; found {first[:100]!r} ({error})") from error


def run_step(shell: Shell, name: str, command: str, timeout_s: float) -> StepResult:
    """Run a command of the row before the tests. Raises: EnvironmentFailed."""
    done = shell.run(_STEP, timeout_s=max(0.1, timeout_s), stdin=command.encode() + b"\n")
    return StepResult(name, done.exit_code, done.text()[-_STEP_KEPT:])


def run_tests(
    shell: Shell, command: str, timeout_s: float, *, quiet_s: float | None = None, steps: tuple[StepResult, ...] = ()
) -> TestRun:
    """Run the test command with bash where there is one, for at most `timeout_s`. steps: what was run before.

    quiet_s: after as much silence it is ended before its time; None: it may be quiet.

    Raises: GradingFailed: it did not start; EnvironmentFailed.
    """
    nonce = secrets.token_hex(16)
    output, timed_out, until = _TestOutput(_end(nonce).encode()), False, 0.0
    program = shell.stream(["sh", "-c", _RUN])
    try:
        program.write(f"{nonce}\n{command}\n".encode())
        program.close_input()
        until = time.monotonic() + max(0.1, timeout_s)
        timed_out = _collect(program, output, until, quiet_s or timeout_s)
    except EnvironmentFailed:
        # What kills all processes inside also cuts the stream. The environment itself knows whether it lives.
        shell.run("true", timeout_s=_PROBE_S)
    finally:
        program.close()
    content = output.content()
    if not timed_out and _start(nonce).encode() not in content:
        raise GradingFailed(f"expected the test command to start; found {content[-800:].decode('utf-8', 'replace')!r}")
    exit_code = _exit_code(content, nonce)
    cut_short = timed_out and exit_code is None and time.monotonic() < until
    memory = exit_code != 0 and shell.run("false", timeout_s=_PROBE_S).out_of_memory  # told to the next command
    return TestRun(nonce, content, exit_code, timed_out and exit_code is None, memory, steps, cut_short)


def _collect(program: InteractiveProgram, output: _TestOutput, until: float, quiet_s: float) -> bool:
    """Read until the end marker, the program's end, the time or a long silence; whether one of the last two came."""
    ended_at: float | None = None
    heard_at = time.monotonic()
    while (left_s := min(until, heard_at + quiet_s) - time.monotonic()) > 0:
        if ended_at is not None and time.monotonic() - ended_at > _AFTER_END_S:
            return False
        piece = program.read(min(left_s, _LOOK_S if ended_at is None else _AFTER_END_S))
        if piece == b"":
            return False
        if piece:
            output.add(piece)
            heard_at = time.monotonic()
        if ended_at is None and output.ended:
            ended_at = time.monotonic()
    return True


@dataclass(slots=True)
class _TestOutput:
    """What came, without its middle where it is too long."""

    end: bytes
    ended: bool = False
    _head: bytearray = field(default_factory=bytearray)
    _tail: bytearray = field(default_factory=bytearray)
    _lost: int = 0

    def add(self, piece: bytes) -> None:
        half = _MOST_OUTPUT_BYTES // 2
        seam = bytes(self._head[-200:] + self._tail[-200:])[-200:] + piece
        self.ended = self.ended or self.end in seam
        room = half - len(self._head)
        self._head += piece[:room]
        self._tail += piece[room:]
        if len(self._tail) > 2 * half:
            self._lost += len(self._tail) - half
            del self._tail[:-half]

    def content(self) -> bytes:
        half = _MOST_OUTPUT_BYTES // 2
        lost = self._lost + max(0, len(self._tail) - half)
        return bytes(self._head) + (left_out(lost, "of the tests' output") if lost else b"") + bytes(self._tail[-half:])


def _exit_code(output: bytes, nonce: str) -> int | None:
    found = re.findall(re.escape(_end(nonce)).encode() + rb" (\d{1,3})\n", output)
    return int(found[-1]) if found else None


def _start(nonce: str) -> str:
    return f">>>>> MegaFlow {nonce} start"


def _end(nonce: str) -> str:
    return f">>>>> MegaFlow {nonce} end"


def _ended(step: StepResult) -> str:
    return "did not end in time" if step.exit_code is None else f"exit code {step.exit_code}"
