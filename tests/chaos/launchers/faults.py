"""Faults as data, and the wrapping that carries them out inside a process of the product.

A plan is a list of rules. A rule names a point on an attempt's way (`Rule.at`), whether it strikes before the point,
after it, or right after the commit in it, and what happens there. Points are functions of the product found by name;
a name that no function has any more is an error, so that a renamed verb cannot turn a case into one without a fault.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.errors import DatabaseUnavailable
from app.ledger.database import Database

PLAN, FOLDER = "CHAOS_PLAN", "CHAOS_FOLDER"

SKEW = "skew"
"""A rule at this point strikes from the start: the clock of every forked process is `seconds` ahead or behind."""

MODULES = {"launcher": "app.workers.launcher", "control": "app.control.worker", "simulation": "app.simulation.host"}
"""The program of each role."""

POINTS: dict[str, tuple[str, ...]] = {
    # of a worker
    "take": ("app.workers.context:WorkerContext.take",),
    "claim": ("app.ledger.attempts:claim", "app.ledger.attempts:claim_many"),
    "hand_over": ("app.ledger.gradings:hand_over",),
    "claim_grading": ("app.ledger.gradings:claim",),
    "renew": ("app.ledger.attempts:renew",),
    "phase": ("app.ledger.attempts:record_phase", "app.ledger.attempts:record_phases"),
    "finish": ("app.ledger.ends:finish", "app.ledger.ends:finish_many"),
    "fail": ("app.ledger.ends:fail", "app.ledger.ends:fail_many"),
    "give_back": ("app.ledger.admission:give_back",),
    "teardown": ("app.ledger.ends:record_teardown",),
    "ready": ("app.ledger.instances:ready", "app.ledger.instances:ready_many"),
    # of the launcher and the control worker
    "exited": ("app.ledger.instances:exited", "app.ledger.instances:exited_many"),
    "launched": ("app.ledger.instances:launched",),
    "admit": ("app.ledger.admission:admit",),
    "request": ("app.ledger.instances:request",),
    "launch": ("app.instances.process:ProcessProvider.launch",),
    "publish": ("app.tasks.attempt:publish",),
    "mark_published": ("app.ledger.admission:mark_published",),
    "lead": ("app.ledger.database:Leadership.held",),
    "reclaim": ("app.ledger.waiting:reclaim_lapsed",),
    # of a producer
    "accept": ("app.ledger.accept:accept",),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One fault.

    at: a key of `POINTS`. when: `before` | `after` the function, or `commit`: right after the transaction that it is in
    has been committed. do: `kill` (SIGKILL to this process), `stop` (SIGSTOP), `error` (DatabaseUnavailable: with
    `commit`, the write is there and the caller is told that it is not), `sleep`, `lose` (the call does not happen),
    `double` (it happens twice), `shuffle` (its items come in another order), `late` (it happens in another thread,
    later), `yes` (it does not happen, and its answer is True).
    """

    at: str
    when: str = "before"
    do: str = "kill"
    phase: str | None = None  # of a recorded one
    number: int | None = None  # only for attempts of this number
    task: str | None = None  # only for tasks whose name begins so
    seconds: float = 0.0
    times: int = 1_000_000  # in all processes together
    chance: float = 1.0


def plan_of_environment() -> list[Rule]:
    return [Rule(**rule) for rule in json.loads(os.environ.get(PLAN, "[]"))]


def environment_of(plan: Sequence[Rule], folder: Path) -> dict[str, str]:
    """What a process must be given to carry out the plan; what happened is found in `folder` (`struck`)."""
    return {PLAN: json.dumps([asdict(rule) for rule in plan]), FOLDER: str(folder)}


def install(plan: Sequence[Rule]) -> list[Undo]:
    """Wrap the functions that the plan names, in this process and in all that it forks; how to undo it."""
    if not plan:
        return []
    undo: list[Undo] = [(Database, "begin", Database.begin)]
    Database.begin = _begin_watched(Database.begin)  # type: ignore[method-assign]
    undo += [_skew(rule.seconds) for rule in plan if rule.at == SKEW]
    for point in {rule.at for rule in plan} - {SKEW}:
        rules = [(n, rule) for n, rule in enumerate(plan) if rule.at == point]
        found = [one for path in POINTS[point] if (one := _wrap(path, rules)) is not None]
        if not found:
            raise LookupError(f"none of {POINTS[point]} exists any more: give point {point!r} its new name")
        undo += found
    return undo


@contextmanager
def installed(plan: Sequence[Rule], folder: Path) -> Iterator[None]:
    """Faults in this very process, for the length of the block: the harness is the producer."""
    os.environ.update(environment_of(plan, folder))
    undo = install(plan)
    try:
        yield
    finally:
        for owner, name, real in reversed(undo):
            setattr(owner, name, real)
        for name in (PLAN, FOLDER):
            os.environ.pop(name, None)


def struck(folder: Path) -> list[dict[str, Any]]:
    """Every fault carried out: {"t": unix seconds, "at": point, "do": …, "attempt": id or None, "pid": …}."""
    found: list[dict[str, Any]] = []
    for file in folder.glob("struck-*.jsonl"):
        found += [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(found, key=lambda fault: fault["t"])


Undo = tuple[Any, str, Any]


def _wrap(path: str, rules: list[tuple[int, Rule]]) -> Undo | None:
    module_name, _, names = path.partition(":")
    owner: Any = importlib.import_module(module_name)
    *outer, name = names.split(".")
    for part in outer:
        owner = getattr(owner, part, None)
    real = getattr(owner, name, None)
    if real is None:
        return None

    @functools.wraps(real)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return _call(real, args, kwargs, rules)

    setattr(owner, name, wrapped)
    return owner, name, real


def _skew(seconds: float) -> Undo:
    """Even process ids live in the future, odd ones in the past; this process, the parent, in the present."""
    real, parent = time.time, os.getpid()

    def skewed() -> float:
        pid = os.getpid()
        return real() + (0.0 if pid == parent else seconds if pid % 2 == 0 else -seconds)

    time.time = skewed
    return time, "time", real


def _call(real: Callable[..., Any], args: Any, kwargs: Any, rules: list[tuple[int, Rule]]) -> Any:
    mine = [(n, rule) for n, rule in rules if _matches(rule, [*args, *kwargs.values()])]
    for n, rule in mine:
        if rule.when == "before":
            if rule.do == "yes":
                _record(rule, args)
                return True
            if rule.do in ("lose", "double", "late", "shuffle") and _allowed(n, rule):
                return _tampered(real, args, kwargs, rule)
            _strike(n, rule, args)
    for n, rule in mine:
        if rule.when == "commit":
            _transaction().append((n, rule, args))
    try:
        result = real(*args, **kwargs)
    finally:
        if not _depth():
            _transaction().clear()  # it opened no transaction, or its own is over
    for n, rule in mine:
        if rule.when == "after" and (rule.at != "claim" or result):
            _strike(n, rule, (*args, result))
    return result


def _tampered(real: Callable[..., Any], args: Any, kwargs: Any, rule: Rule) -> Any:
    _record(rule, args)
    match rule.do:
        case "lose":
            return None
        case "double":
            real(*args, **kwargs)
            return real(*args, **kwargs)
        case "late":
            threading.Timer(rule.seconds, real, args, kwargs).start()
            return None
        case _:
            *first, items = args
            shuffled = random.sample(list(items), len(items))
            return real(*first, shuffled, **kwargs)


def _strike(n: int, rule: Rule, args: Any) -> None:
    if not _allowed(n, rule):
        return
    _record(rule, args)
    match rule.do:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(rule.seconds)
        case "error":
            raise DatabaseUnavailable("chaos: the server closed the connection unexpectedly")
        case other:
            raise ValueError(f"rule {rule}: cannot {other} here")


def _allowed(n: int, rule: Rule) -> bool:
    """Draw one of the rule's `times`, shared by all processes through files that can be made once."""
    if random.random() > rule.chance:
        return False
    if rule.times >= 1_000_000:
        return True
    for ticket in range(rule.times):
        try:
            os.close(os.open(_folder() / f"ticket-{n}-{ticket}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return True
    return False


def _record(rule: Rule, args: Any) -> None:
    about = next((one for one in _flat(args) if getattr(one, "attempt_id", None) is not None), None)
    line = json.dumps(
        {
            "t": time.time(),
            "at": rule.at,
            "when": rule.when,
            "do": rule.do,
            "attempt": str(about.attempt_id) if about is not None else None,
            "pid": os.getpid(),
        }
    )
    with (_folder() / f"struck-{os.getpid()}.jsonl").open("a") as file:
        file.write(line + "\n")


def _folder() -> Path:
    return Path(os.environ[FOLDER])


def _matches(rule: Rule, values: Sequence[Any]) -> bool:
    if rule.phase is not None and not any(str(getattr(one, "phase", one)) == rule.phase for one in _flat(values)):
        return False
    if rule.number is not None and not any(getattr(one, "number", None) == rule.number for one in _flat(values)):
        return False
    return rule.task is None or any(_name(one).startswith(rule.task) for one in _flat(values))


def _flat(values: Any) -> Iterator[Any]:
    """The arguments, and what lists of arguments hold, with the claim or message inside of each."""
    for value in values:
        items = value if isinstance(value, list | tuple) else [value]
        for item in items:
            yield item
            for inner in ("claimed", "message"):
                if hasattr(item, inner):
                    yield getattr(item, inner)


def _name(one: Any) -> str:
    return str(one.spec.task.name) if hasattr(one, "spec") else ""


_of_thread = threading.local()


def _transaction() -> list[tuple[int, Rule, Any]]:
    """The rules that wait for the commit of this thread's transaction."""
    if not hasattr(_of_thread, "rules"):
        _of_thread.rules = []
    found: list[tuple[int, Rule, Any]] = _of_thread.rules
    return found


def _depth() -> int:
    return int(getattr(_of_thread, "depth", 0))


def _begin_watched(real: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def begin(self: Database, *args: Any, **kwargs: Any) -> Iterator[Any]:
        _of_thread.depth = _depth() + 1
        try:
            with real(self, *args, **kwargs) as connection:
                yield connection
        except BaseException:
            _transaction().clear()
            raise
        finally:
            _of_thread.depth -= 1
        waiting, _of_thread.rules = _transaction(), []
        for n, rule, about in waiting:
            _strike(n, rule, about)

    return begin
