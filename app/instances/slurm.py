"""The `slurm` provider: an instance is a task of an array job, with its Celery worker inside.

Slurm is controlled by its own commands. Instances launched together are one array job. Its folder in `home`/run/slurm,
which the compute nodes see, has the list of the instances, in the order of the tasks, and their settings, in a file for
this user alone. No setting is on a command line, in the job's environment or in its script. The folder is deleted when
the last instance has ended.

Slurm sends no events, so `watch` lists all tasks of the installation every few seconds. Slurm lists ended ones, with
their exit codes, for its `MinJobAge` (five minutes by default); an end that is noticed later has no code.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from uuid import UUID

import structlog

from app.errors import InstanceFailed, LaunchUnclear, NoCapacity
from app.instances.base import OnExit
from app.instances.environment import CERTIFICATES, exports, passed_on
from app.models.instance import InstanceRequest
from app.settings import PREFIX, Settings

log = structlog.get_logger()

_LOOK_S = 3.0
"""Time between two looks of `watch`."""
_ANSWER_S = 40.0
"""Time limit of a command; Slurm's own timeout is about 10 s."""
_UNCLEAR_S = 600.0
"""Time after which a launch counts as failed if its answer was lost and none of its instances was seen."""
_ANSWERED = "answered"
"""File in the folder of a batch that Slurm has accepted."""
_MOST_TASKS = 500
"""Number of tasks of one array: Slurm accepts 1,000 by default (`MaxArraySize`)."""
_NOTICE_S = 60
"""Time between an instance's stop signal and its walltime's end; Slurm may send it a minute earlier still."""

_TO_JOBS = re.compile(r"PATH|HOME|USER|LOGNAME|LANG|LC_\w+|(SLURM|SBATCH|SQUEUE|SCANCEL)_\w+")
"""Variables that the commands get: sbatch passes on what it has."""
_FIELDS = "JobArrayID:|,Comment:|,State:|,exit_code:|,TimeUsed:|,Reason:"
_ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"}
    | {"OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "SPECIAL_EXIT", "TIMEOUT"}
)
_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD"})
_NOT_REACHED = re.compile(r"Unable to contact slurm controller")
_NO_ANSWER = re.compile(
    r"timed out|Zero Bytes|reset by peer|[Bb]roken pipe|unexpected|temporarily unable", re.IGNORECASE
)
_FULL = re.compile(
    r"not available|cannot be satisfied|can not be satisfied|limit|polic|permitted|exceed", re.IGNORECASE
)

_SCRIPT = """#!/bin/sh
# An instance of MegaFlow: which one, says the line of this array task in its batch's list.
set -f
set -- $(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {folder}/instances)
exec >>{logs}/"$1".log 2>&1
. {folder}/environment
exec {python} -m app.workers.instance "$2"
"""


@dataclass(frozen=True, slots=True)
class SlurmTask:
    """A task of an array job, as Slurm lists it."""

    handle: str  # JOB_INDEX
    state: str
    status: int  # of its script, as `wait` gives it
    run_s: float | None  # None: it waits in the queue
    reason: str

    @property
    def lives(self) -> bool:
        return self.state not in _ENDED

    @property
    def exit_code(self) -> int | None:
        """Exit code of the worker; None: there was none."""
        if self.status or self.state == "COMPLETED":
            return self.status >> 8 if not self.status & 0x7F else -(self.status & 0x7F)
        return None


@dataclass(slots=True)
class SlurmBatch:
    """The instances of one array job, in the order of its tasks, and their folder."""

    folder: Path
    ids: tuple[UUID, ...]
    made_at: float  # seconds since 1970
    seen: bool = False  # Slurm has accepted it
    reported: set[UUID] = field(default_factory=set)


class SlurmInstances:
    """The handle is JOB_INDEX, as Slurm calls a task of an array. Safe to share among threads."""

    name: ClassVar[str] = "slurm"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._folder = settings.home / "run" / "slurm"
        self._logs = settings.home / "logs" / "instances"
        self._job_name = f"megaflow-{settings.installation}"
        self._watching = False
        self._known: dict[str, SlurmBatch] = {}  # by its folder's name, which is its job's comment

    def launch(self, requests: Sequence[InstanceRequest]) -> dict[UUID, str]:
        """Launches as many as Slurm accepts. Raises: NoCapacity: it accepts none; InstanceFailed, LaunchUnclear."""
        living = self.alive()
        handles = {r.instance_id: living[r.instance_id] for r in requests if r.instance_id in living}
        alike: dict[tuple[str, ...], list[InstanceRequest]] = defaultdict(list)
        for request in requests:
            if request.instance_id not in handles:
                alike[self._options(request)].append(request)
        for options, group in alike.items():
            for begin in range(0, len(group), _MOST_TASKS):
                try:
                    handles |= self._submit_most(options, group[begin : begin + _MOST_TASKS])
                except NoCapacity:
                    if not handles:
                        raise
                    return handles
        return handles

    def terminate(self, instance_id: UUID, handle: str, *, grace_s: float) -> None:
        """Has Slurm stop the worker, and kill what is left after its own `KillWait` (30 s by default)."""
        self._run("scancel", "--quiet", handle)

    def alive(self) -> dict[UUID, str]:
        """Lists living instances, and those whose end `watch` is about to report, to keep their exit codes."""
        tasks = self._tasks(batches := self._batches())
        reported = set[UUID]().union(*(batch.reported for batch in batches.values()))
        return {i: task.handle for i, task in tasks.items() if task.lives or (self._watching and i not in reported)}

    def started(self) -> dict[UUID, float | None]:
        """Returns the seconds since each began to run; None: it waits in Slurm's queue. Raises: InstanceFailed."""
        return {instance_id: task.run_s for instance_id, task in self._tasks(self._batches()).items() if task.lives}

    def watch(self, on_exit: OnExit, stop: threading.Event) -> None:
        self._watching = True
        while not stop.is_set():
            try:
                self._look(on_exit)
            except (InstanceFailed, OSError) as error:
                log.debug("instance.slurm_silent", error=str(error))
            stop.wait(_LOOK_S)
        self._watching = False

    def _look(self, on_exit: OnExit) -> None:
        batches = self._batches()  # read before the tasks: a batch submitted in between must not count as ended
        for batch in batches.values():
            batch.seen = batch.seen or (batch.folder / _ANSWERED).exists()
        submitted = [name for name, batch in batches.items() if batch.seen]
        tasks = self._tasks(batches)
        for name, batch in batches.items():
            here = name in submitted or not tasks.keys().isdisjoint(batch.ids)
            if not here and time.time() - batch.made_at < _UNCLEAR_S:
                continue
            living = [i for i in batch.ids if i in tasks and tasks[i].lives]
            for instance_id in set(batch.ids) - {*living} - batch.reported:
                task = tasks.get(instance_id)
                words = f"Slurm has it as {task.state} ({task.reason})" if task else "Slurm does not have it any more"
                on_exit(instance_id, task.exit_code if task else None, words)
                batch.reported.add(instance_id)
            if not living:
                shutil.rmtree(batch.folder, ignore_errors=True)
                self._known.pop(batch.folder.name, None)

    def _tasks(self, batches: Mapping[str, SlurmBatch]) -> dict[UUID, SlurmTask]:
        """Returns Slurm's tasks for this installation's instances, ended ones too. Of two tasks the first."""
        columns = ["--me", "--noheader", "--array", "--states=all", f"--name={self._job_name}"]
        lines = self._run("squeue", *columns, f"--Format={_FIELDS}").splitlines()
        tasks: dict[UUID, SlurmTask] = {}
        twice = []
        for task, comment in sorted((_task(line) for line in lines if line), key=lambda pair: _number(pair[0])):
            _, index = _number(task)
            if (batch := batches.get(comment)) is None or index >= len(batch.ids):
                continue  # of another home with this installation's name, or cancelled before it had a number
            batch.seen = True
            first = tasks.get(batch.ids[index])
            if first is None or not first.lives:
                tasks[batch.ids[index]] = task
            elif task.lives:
                twice.append(task.handle)
        if twice:
            log.warning("instance.made_twice", handles=twice)
            self._run("scancel", "--quiet", *twice)
        return tasks

    def _batches(self) -> dict[str, SlurmBatch]:
        names = os.listdir(self._folder) if self._folder.is_dir() else []
        for name in names:
            if name not in self._known:
                try:
                    lines = (self._folder / name / "instances").read_text().splitlines()
                    made_at = (self._folder / name).stat().st_mtime
                except OSError:
                    continue  # being created, or removed meanwhile
                ids = tuple(UUID(line.split()[0]) for line in lines)
                self._known[name] = SlurmBatch(self._folder / name, ids, made_at)
        return {name: self._known[name] for name in names if name in self._known}

    def _submit_most(self, options: Sequence[str], requests: Sequence[InstanceRequest]) -> dict[UUID, str]:
        """Submits as many as Slurm accepts at once, by halves. Raises: NoCapacity: not even one."""
        while True:
            try:
                return self._submit(options, requests)
            except NoCapacity as error:
                if len(requests) == 1:
                    raise
                log.warning("instance.not_started", instances=len(requests), error=str(error))
                requests = requests[: len(requests) // 2]

    def _submit(self, options: Sequence[str], requests: Sequence[InstanceRequest]) -> dict[UUID, str]:
        folder = self._write(requests)
        script = _SCRIPT.format(
            folder=shlex.quote(str(folder)),
            logs=shlex.quote(str(self._logs)),
            python=shlex.quote(str(self._settings.slurm_python or sys.executable)),
        )
        options = [*options, f"--comment={folder.name}", f"--array=0-{len(requests) - 1}"]
        try:
            answer = self._run("sbatch", *options, stdin=script)
        except InstanceFailed as error:
            if not isinstance(error, LaunchUnclear):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        (folder / _ANSWERED).touch()
        return {r.instance_id: f"{answer.strip().partition(';')[0]}_{n}" for n, r in enumerate(requests)}

    def _write(self, requests: Sequence[InstanceRequest]) -> Path:
        self._logs.mkdir(parents=True, exist_ok=True)
        making = self._folder / f".{secrets.token_hex(8)}"
        making.mkdir(parents=True, mode=0o700)
        lines = [f"{request.instance_id} {request.model_dump_json()}\n" for request in requests]
        (making / "instances").write_text("".join(lines))
        (making / "environment").touch(0o600)
        (making / "environment").write_bytes(exports(self._environment()))
        return making.rename(self._folder / making.name.removeprefix("."))

    def _environment(self) -> dict[str, str]:
        home = self._settings.slurm_home or self._settings.home
        files = {name: os.environ[name] for name in CERTIFICATES if os.path.isfile(os.environ.get(name, ""))}
        return (
            passed_on() | files | self._settings.variables() | {f"{PREFIX}HOME": str(home), "PATH": os.environ["PATH"]}
        )

    def _options(self, request: InstanceRequest) -> tuple[str, ...]:
        """Returns options for sbatch. A size that the class leaves open is what its tasks are guaranteed."""
        settings = self._settings
        cpus = request.cpus or settings.task_cpus * request.slots
        memory = request.memory_bytes or (settings.task_memory_bytes + settings.instance_memory_bytes) * request.slots
        options = ["--parsable", "--no-requeue", f"--job-name={self._job_name}", "--output=/dev/null"]
        options += [f"--chdir={settings.home}", "--ntasks=1", f"--cpus-per-task={math.ceil(cpus)}"]
        options += [f"--mem={math.ceil(memory / (1 << 20))}M", f"--signal=B:TERM@{_NOTICE_S}"]
        options += [f"--gpus={request.gpus}"] if request.gpus else []
        if request.lifetime_s is not None:  # the stop signal comes after the lifetime, not before
            options.append(f"--time={math.ceil(request.lifetime_s / 60) + 2}")
        own = f"{settings.slurm_arguments} {settings.slurm_class_arguments.get(request.resource_class, '')}"
        return (*options, *shlex.split(own))

    def _run(self, *command: str, stdin: str = "") -> str:
        """Returns the command's output. Raises: InstanceFailed, its kind by Slurm's message."""
        environment = {name: value for name, value in os.environ.items() if _TO_JOBS.fullmatch(name)}
        unclear = LaunchUnclear if command[0] == "sbatch" else InstanceFailed
        try:
            result = subprocess.run(  # noqa: S603 (Slurm's own commands)
                command, input=stdin, env=environment, capture_output=True, text=True, timeout=_ANSWER_S
            )
        except OSError as error:
            raise InstanceFailed(f"expected Slurm's command {command[0]} on this host, found: {error}") from error
        except subprocess.TimeoutExpired as error:
            raise unclear(f"expected an answer to {command[0]} within {_ANSWER_S:.0f} s, found none") from error
        if result.returncode == 0:
            return result.stdout
        message = "; ".join(line.split("error: ", 1)[-1] for line in result.stderr.strip().splitlines())
        raise _kind(message, unclear)(f"{command[0]}: {message or f'exit code {result.returncode}'}")


def _kind(said: str, unclear: type[InstanceFailed]) -> type[InstanceFailed]:
    if _NOT_REACHED.search(said):
        return InstanceFailed
    if _NO_ANSWER.search(said):
        return unclear
    return NoCapacity if _FULL.search(said) else InstanceFailed


def _task(line: str) -> tuple[SlurmTask, str]:
    handle, comment, state, status, used, reason = (part.strip() for part in line.split("|", 5))
    run_s = None if state in _WAITING else _seconds(used)
    return SlurmTask(handle, state, int(status), run_s, reason), comment


def _number(task: SlurmTask) -> tuple[int, int]:
    """Returns the numbers of the job and of its task; without a task number, one above all tasks."""
    job, _, index = task.handle.partition("_")
    return int(job), int(index) if index.isdigit() else sys.maxsize


def _seconds(used: str) -> float:
    """Parses `[DAYS-][HOURS:]MINUTES:SECONDS`; 0 when it is none of these."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", used)
    if match is None:
        return 0.0
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
