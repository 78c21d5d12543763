"""Runs a task's test command and reads its output over the session's stream, between markers with a secret."""

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
_AFTER_END_S = 1.0  # for the program's exit; background processes of the tests may keep its output open
_PROBE_S = 60.0
_STEP_KEPT = 8000  # characters of the output of a step before the tests
_HEADER = "megaflow-report"

# The marker comes over stdin: in an argument or a variable every program inside could read it. So does the command: a
# file could be changed while the shell reads it. An argument holds 128 KiB.
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
    """Result of a command before the tests. Its failure is no verdict: grading continues, as in other harnesses."""

    name: str
    exit_code: int | None  # None: killed for its time
    output: str
    """End of the output."""


@dataclass(frozen=True, slots=True)
class TestRun:
    """A run of a test command. `output` is everything from the stream, with the markers."""

    __test__ = False  # not a test class, despite its name
    nonce: str
    output: bytes
    exit_code: int | None  # of the test command; None: it did not end
    timed_out: bool = False
    out_of_memory: bool = False
    steps: tuple[StepResult, ...] = ()
    cut_short: bool = False  # ended because of silence, before its time limit; `timed_out` is then set, too
    rule: str | None = None  # why a resolved verdict is suspect; empty: it is not; None: an earlier release's report
    control: str = ""  # the test that must be reported as failed (`control_test`); empty: there was none

    @property
    def judged(self) -> str:
        """Text between the first start and the last end of our markers; without an end, everything after the start."""
        after = self.output.decode("utf-8", "replace").partition(f"{_start(self.nonce)}\n")[2]
        return after if self.exit_code is None else after.rpartition(f"\n{_end(self.nonce)} ")[0]

    @property
    def is_cut(self) -> bool:
        """Whether the middle of its output was left out."""
        return len(self.output) > _MOST_OUTPUT_BYTES

    @property
    def broken_off(self) -> bool:
        """Whether the command's shell was killed by a process in it: neither its end nor our limit was reached."""
        return self.exit_code is None and not self.timed_out

    @property
    def unended(self) -> bool:
        """Whether it did not end, for another reason than memory, which is the task's own limit."""
        return self.exit_code is None and not self.out_of_memory

    def report(self) -> bytes:
        """Returns the run as stored: a line of facts, the ends of the steps, the output. `read_report` reads it."""
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
    """Reads a stored run for judging it again; its steps are left out.

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
    """Runs a command of the row before the tests. Raises: EnvironmentFailed."""
    result = shell.run(_STEP, timeout_s=max(0.1, timeout_s), stdin=command.encode() + b"\n")
    return StepResult(name, result.exit_code, result.text()[-_STEP_KEPT:])


def run_tests(
    shell: Shell, command: str, timeout_s: float, *, quiet_s: float | None = None, steps: tuple[StepResult, ...] = ()
) -> TestRun:
    """Runs the test command with bash if there is one, for at most `timeout_s`. steps: commands that ran before.

    quiet_s: it is ended early after this much silence; None: it may be quiet.

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
        # Killing all processes inside also cuts the stream. The environment itself knows whether it lives.
        shell.run("true", timeout_s=_PROBE_S)
    finally:
        program.close()
    content = output.content()
    if not timed_out and _start(nonce).encode() not in content:
        raise GradingFailed(f"expected the test command to start; found {content[-800:].decode('utf-8', 'replace')!r}")
    exit_code = _exit_code(content, nonce)
    cut_short = timed_out and exit_code is None and time.monotonic() < until
    memory = exit_code != 0 and shell.run("false", timeout_s=_PROBE_S).out_of_memory  # reported to the next command
    return TestRun(nonce, content, exit_code, timed_out and exit_code is None, memory, steps, cut_short)


def _collect(program: InteractiveProgram, output: _TestOutput, until: float, quiet_s: float) -> bool:
    """Reads until the end marker, the program's end, the time limit or a long silence; True for the last two."""
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
    """Received output, without its middle if it is too long."""

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
    codes = re.findall(re.escape(_end(nonce)).encode() + rb" (\d{1,3})\n", output)
    return int(codes[-1]) if codes else None


def _start(nonce: str) -> str:
    return f">>>>> MegaFlow {nonce} start"


def _end(nonce: str) -> str:
    return f">>>>> MegaFlow {nonce} end"


def _ended(step: StepResult) -> str:
    return "did not end in time" if step.exit_code is None else f"exit code {step.exit_code}"
