"""Grades a Harbor or Terminal-Bench goal: a script checks the environment and writes a reward.

With several containers any may be checked: each script runs in one of them and finds the logs of all.

Source: Harbor's verifier: `reward.json` (flat numbers) overrides `reward.txt`; old ones are removed first; a missing,
empty or non-finite reward means not scored. The script's exit code has no meaning.
"""

from __future__ import annotations

import io
import json
import math
import posixpath
import re
import shlex
import tarfile
from dataclasses import dataclass, replace
from typing import Any

import structlog

from app.errors import EnvironmentFailed, GradingFailed, SpecInvalid, TestRunnerMissing
from app.grading import protected
from app.grading.base import NO_SUCH_PROGRAM, Grade, GradingInput, HandedOver, out_of_memory
from app.models.outcome import MOST_REWARD, Verdict
from app.models.shell import Services, Shell
from app.models.spec import ScriptGoal

log = structlog.get_logger(__name__)

_STEP_TIMEOUT_S = 60.0
_SETTLED_S = 0.3
"""A reward that is written again within this time after the script's end does not come from the script."""
_CONTRADICTED = "reward.json and reward.txt contradict each other: one is not the script's"
_ODD_BESIDE = "reward.txt beside reward.json is no file with a number: something kept the script from writing it"
_WRITTEN_LATER = "the reward was written after the tests had ended"
_TAIL_CHARACTERS = 1200
_GRADER = "the task's script"
_MOST_REWARD_BYTES = 1 << 20
_MOST_METRICS = 1000
_MOST_NAME = 200
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?(?:nan|inf|infinity)", re.I)


@dataclass(frozen=True, slots=True)
class _Judged:
    """Result of one script. `service` is None for where the agent acted."""

    service: str | None
    rewards: dict[str, float]
    reward: float
    report: bytes
    took_s: float
    beside: str = ""
    """Additional text for the detail."""
    suspect: str = ""
    """Rule by which the result is suspect."""


class ScriptGrader:
    """Grades `ScriptGoal`, in the environment where the agent worked: where it acted, or in other services."""

    def __init__(self, goal: ScriptGoal) -> None:
        self._goal = goal
        self.fresh_environment = goal.environment is not None
        # Without a container these folders have other paths, which the environment sets for its commands.
        self._tests = f'"${{TESTS_DIR:-{_quoted(goal.tests_path)}}}"'
        self._logs = f'"${{LOGS_DIR:-{_quoted(goal.logs_path)}}}"'
        self._verifier = f'"${{LOGS_DIR:-{_quoted(goal.logs_path)}}}/verifier"'
        self._verifier_path = f"{goal.logs_path}/verifier"
        self._services = f'"${{LOGS_DIR:-{goal.logs_path}}}/services"'

    def grade(self, submission: GradingInput, shell: Shell) -> Grade:
        if submission.tests_files is None:
            raise GradingFailed("expected the task's tests folder; found none; submit the dataset again")
        goal, left_s = self._goal, submission.task.limits.grading_timeout_s
        places = [
            (name, command, self._place(shell, name))  # before any change: a name may be wrong
            for name, command in ((goal.service, goal.command), *((one.service, one.command) for one in goal.also))
        ]
        logs = _logs(shell)
        log.info("grading.script_started", task=submission.task.name, timeout_s=left_s)
        for one in submission.handed_over:
            _put(shell, one)
        judged: list[_Judged] = []
        for name, command, place in places:
            self._lay_out(submission.tests_files, logs, place)
            judged.append(self._judged(name, command, place, left_s, out_of_memory(submission)))
            left_s -= judged[-1].took_s
        graded = _grade_of(judged)
        return replace(graded, verdict=graded.verdict.suspected(self._handed_rule(submission)))

    def _handed_rule(self, submission: GradingInput) -> str:
        task, own = submission.task, self._goal.environment
        paths = [path for one in submission.handed_over for path in _paths(one)]
        workdir = (own.workdir if own is not None else None) or ""
        shadow = protected.comes_first(paths, workdir, task.description)
        return f"files that could change the judgement: {shadow}" if shadow else ""

    def _judged(self, service: str | None, command: str, shell: Shell, timeout_s: float, at_limit: str) -> _Judged:
        """Runs one script. timeout_s: time left for it. at_limit: the message when memory ran out meanwhile.

        Raises: GradingFailed.
        """
        where = "" if service is None else f" in the service {service!r}"
        run = shell.run(f"{{ {command}\n}} 2>&1 </dev/null", timeout_s=max(0.1, timeout_s))
        report = run.stdout + run.stderr  # over the session: nothing inside can change earlier output
        memory = f"; {at_limit}" if run.out_of_memory else ""
        try:
            if run.timed_out:
                raise ValueError(f"expected the tests script to end within {timeout_s:.0f} s; found it running")
            reward = _reward(rewards := self._rewards(shell), self._goal.reward_range)
        except ValueError as error:
            ended = "" if run.timed_out else f"; its exit code was {run.exit_code}"
            why = f"{error}{where}{ended}{memory}"
            if not run.out_of_memory:
                missing = not run.timed_out and run.exit_code in NO_SUCH_PROGRAM
                raise (TestRunnerMissing if missing else GradingFailed)(why + _end(report)) from error
            # The limit is the task's own, and a good solution passes under it (as the oracle shows). So files or
            # processes that the agent left filled the memory, and this is a result, as with a full disk. A retry would
            # neither help the task nor be fair, since an agent about to fail could force it in this way.
            return _Judged(service, {}, 0.0, report, run.duration_s, f": {why}{_end(report)}")
        suspect = self._suspect(shell, reward) if reward > 0 else ""
        return _Judged(service, rewards, reward, report, run.duration_s, memory, suspect)

    def _place(self, shell: Shell, name: str | None) -> Shell:
        if name is None:
            return shell
        known = shell.services if isinstance(shell, Services) else ()
        if not isinstance(shell, Services) or name not in known:
            description = ", ".join(known) or "an environment of one container"
            raise GradingFailed(f"expected the service {name!r}, in which the tests are to run; found {description}")
        return shell.service(name)

    def _lay_out(self, tests: bytes, logs: dict[str, bytes], shell: Shell) -> None:
        """Writes the tests into an empty folder, and the services' logs; removes old rewards."""
        if self._goal.brings_tests:
            shell.run(f"rm -rf {self._verifier}; mkdir -p {self._verifier}", timeout_s=_STEP_TIMEOUT_S)
            return
        services = f" {self._services}" if logs else ""
        result = shell.run(
            f'for link in {self._tests} {self._logs}; do [ ! -L "$link" ] || rm -f "$link"; done; '
            f"rm -rf {self._verifier}{services} {self._tests}/* {self._tests}/.[!.]* {self._tests}/..?*; "
            f"mkdir -p {self._verifier}{services} {self._tests} && "
            f'[ -z "$(ls -A {self._verifier})" ] && [ -z "$(ls -A {self._tests})" ]',
            timeout_s=_STEP_TIMEOUT_S,
        )
        if not result.ok:
            raise GradingFailed(
                f"expected empty folders {self._goal.tests_path} and {self._verifier_path}; "
                f"found {result.text().strip()[-400:] or 'something left in them'}; may they be made in this image?"
            )
        shell.put_tree(tests, self._goal.tests_path)
        for name, content in logs.items():
            shell.put(f"{self._goal.logs_path}/services/{name}.log", content, mode=0o444)

    def _suspect(self, shell: Shell, reward: float) -> str:
        if self._is_still_written(shell):
            return _WRITTEN_LATER
        odd = (
            f"cd {self._verifier} && [ -e reward.json ] || exit 1; [ -h reward.txt ] || "
            "{ [ -e reward.txt ] && { [ ! -f reward.txt ] || [ ! -s reward.txt ]; }; }"
        )
        if shell.run(odd, timeout_s=_STEP_TIMEOUT_S).ok:
            return _ODD_BESIDE
        try:
            beside = _single(self._read(shell, "reward.txt").decode("utf-8").strip())["reward"]
        except FileNotFoundError:
            return ""
        except ValueError:
            return _ODD_BESIDE
        return _CONTRADICTED if beside != reward else ""

    def _is_still_written(self, shell: Shell) -> bool:
        times = f"stat -c '%n %y' {self._verifier}/reward.json {self._verifier}/reward.txt 2>/dev/null"
        looked = shell.run(f"{times}; sleep {_SETTLED_S}; {times}; true", timeout_s=_STEP_TIMEOUT_S)
        lines = looked.stdout.decode("utf-8", "replace").splitlines()
        return not looked.ok or lines[: len(lines) // 2] != lines[len(lines) // 2 :]

    def _rewards(self, shell: Shell) -> dict[str, float]:
        """Raises: ValueError."""
        for name, read in (("reward.json", _numbers), ("reward.txt", _single)):
            try:
                return read(self._read(shell, name).decode("utf-8").strip())
            except FileNotFoundError:
                continue
            except (ValueError, RecursionError) as error:
                raise ValueError(f"expected finite numbers in {name}; found {error}") from error
        raise ValueError("expected the tests script to write reward.json or reward.txt; found neither")

    def _read(self, shell: Shell, name: str) -> bytes:
        """Reads a reward's file. Raises: FileNotFoundError; ValueError: it is no small file; EnvironmentFailed."""
        path = f"{self._verifier_path}/{name}"
        sized = shell.run(f"stat -L -c %s {self._verifier}/{name} 2>/dev/null", timeout_s=_STEP_TIMEOUT_S)
        if (size := sized.stdout.strip()).isdigit() and int(size) > _MOST_REWARD_BYTES:
            raise ValueError(f"{int(size):,} bytes, more than {_MOST_REWARD_BYTES:,}")
        try:
            return shell.get(path)
        except EnvironmentFailed as error:
            if type(error) is not EnvironmentFailed:
                raise  # the environment itself has ended, not its content
            if not shell.run("true", timeout_s=_STEP_TIMEOUT_S).ok:
                raise
            raise ValueError(f"a file that cannot be read: {error}") from error


def _paths(one: HandedOver) -> list[str]:
    if not one.is_folder:
        return [one.path]
    with tarfile.open(fileobj=io.BytesIO(one.content)) as tree:
        return [posixpath.normpath(f"{one.path}/{member.name}") for member in tree]


def _put(shell: Shell, one: HandedOver) -> None:
    """Raises: GradingFailed: it does not fit, such as a folder at the path of a file; EnvironmentFailed."""
    try:
        shell.put_tree(one.content, one.path) if one.is_folder else shell.put(one.path, one.content, mode=0o755)
    except (EnvironmentFailed, SpecInvalid) as error:
        if type(error) not in (EnvironmentFailed, SpecInvalid):
            raise
        raise GradingFailed(f"expected an artifact that can be put at {one.path}; found: {error}") from error


def _logs(shell: Shell) -> dict[str, bytes]:
    """Returns each service's log, empty if none is available; returns nothing for a single container."""
    names = shell.services if isinstance(shell, Services) else ()
    if not isinstance(shell, Services) or not names:
        return {}
    logs = shell.logs()
    return {name: logs.get(name, b"") for name in names}


def _grade_of(judged: list[_Judged]) -> Grade:
    """Returns one script's result unchanged; of several the lowest reward, with all details."""
    if len(judged) == 1:
        only = judged[0]
        detail = f"the tests script gave {only.reward:g}{only.beside}"
        verdict = Verdict(reward=only.reward, counts=True, detail=detail, metrics=only.rewards, grader=_GRADER)
        return Grade(verdict.suspected(only.suspect), only.report)
    reward = min(one.reward for one in judged)
    summary = ", ".join(f"{_name(one)} {one.reward:g}{one.beside}" for one in judged)
    metrics = {f"{_name(one)}.{name}": number for one in judged for name, number in one.rewards.items()}
    report = b"\n".join(f"--- {_name(one)} ---\n".encode() + one.report for one in judged)
    verdict = Verdict(
        reward=reward,
        counts=True,
        detail=f"the lowest of what the tests scripts gave: {summary}",
        metrics={**metrics, "reward": reward},
        grader=_GRADER,
    )
    return Grade(verdict.suspected(next((one.suspect for one in judged if one.suspect), "")), report)


def _name(judged: _Judged) -> str:
    return judged.service or "agent"


def _numbers(text: str) -> dict[str, float]:
    values: Any = json.loads(text, object_pairs_hook=_without_doubles) if text else None
    if not isinstance(values, dict) or not values:
        raise ValueError(f"{text[:200]!r}, which is no JSON object of numbers")
    if len(values) > _MOST_METRICS:
        raise ValueError(f"{len(values):,} of them, more than {_MOST_METRICS:,}")
    for name in values:
        if not name.isprintable() or not 1 <= len(name) <= _MOST_NAME:
            raise ValueError(f"the name {name[:_MOST_NAME]!r}, which is not 1 to {_MOST_NAME} printable characters")
    return {name: _finite(value) for name, value in values.items()}


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses a name with two values: one of them may not be the script's."""
    if len(values := dict(pairs)) < len(pairs):
        raise ValueError("one name twice")
    return values


def _single(text: str) -> dict[str, float]:
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{text[:200]!r}, which is no number")
    return {"reward": _finite(float(text))}


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r}, which is no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{str(value)[:40]}, which is not finite")
    if abs(number) > MOST_REWARD:
        raise ValueError(f"{number:g}, which is not between -{MOST_REWARD:g} and {MOST_REWARD:g}")
    return number


def _reward(rewards: dict[str, float], bounds: tuple[float, float] | None) -> float:
    """Raises: ValueError: it is unclear which number is the reward, or it is outside of the task's range."""
    if "reward" not in rewards and len(rewards) > 1:
        raise ValueError(f"expected a number named `reward`, or just one; found {', '.join(sorted(rewards))}")
    reward = rewards.get("reward", next(iter(rewards.values())))
    if bounds is not None and not bounds[0] <= reward <= bounds[1]:
        raise ValueError(
            f"expected a reward in the task's reward_range, {bounds[0]:g} to {bounds[1]:g}; found {reward:g}"
        )
    return reward


def _quoted(path: str) -> str:
    """Returns a path that is safe inside double quotes."""
    if shlex.quote(path) != path:
        raise GradingFailed(f"expected a plain absolute path; found {path!r}")
    return path


def _end(report: bytes) -> str:
    text = report.decode("utf-8", "replace").strip()
    return f"; its output ends with:\n{text[-_TAIL_CHARACTERS:]}" if text else "; it printed nothing"
