"""Runs cases one after the other on the same servers, each on a fixture of its own, and says how each went."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.chaos.case import Case
from tests.chaos.fixture import Fixture, fixture
from tests.chaos.judge import Verdict, judge
from tests.chaos.report import COLUMNS
from tests.chaos.servers import Servers, serving

Say = Callable[[str], None]


def run_all(cases: Iterable[Case], out: Path, say: Say) -> Iterator[Verdict]:
    """Every case's verdict, in order. Ctrl-C ends the case under way and everything that was started."""
    with serving() as servers:
        for case in cases:
            say(f"{case.name:<34} …")
            verdict = run(case, servers, out)
            say(f"{case.name:<34} {line_of(verdict)}")
            for note in verdict.notes[:12]:
                say(f"    {note}")
            yield verdict


def run(case: Case, servers: Servers, out: Path) -> Verdict:
    """Break, wait, rest, stop, judge."""
    begun = time.monotonic()
    relays = {f"{name}_relay": True for name in case.relays}
    servers.heal()
    with fixture(servers, out, **relays, **case.settings) as here:
        try:
            case.act(here)
        except Exception as error:  # a case that cannot be carried out is not a case that went well
            here.wrong.append(f"the case broke off: {type(error).__name__}: {error}")
            here.notes.append(traceback.format_exc(limit=4))
        verdict = _end(case, here)
    verdict.took_s = round(time.monotonic() - begun, 1)
    return verdict


def _end(case: Case, here: Fixture) -> Verdict:
    here.servers.start_postgres()
    here.servers.start_redis()
    if here.wait(case.within_s):
        here.settle()
    stubborn = here.programs.stop_all()
    here.wrong += [f"{name} did not stop when told to and had to be killed" for name in stubborn]
    here.watch.stop()
    verdict = judge(case.name, here, least_faults=case.least_faults)
    if not verdict.passed:
        _keep_logs(case, here)
    return verdict


def _keep_logs(case: Case, here: Fixture) -> None:
    """The logs of a case that went wrong, beside the report."""
    folder = here.out / "logs" / case.name
    folder.mkdir(parents=True, exist_ok=True)
    for log in (here.settings.home / "logs").rglob("*.log"):
        (folder / log.name).write_bytes(log.read_bytes()[-200_000:])


def line_of(verdict: Verdict) -> str:
    """One line for a person."""
    text = "  ".join(f"{name} {getattr(verdict, name)}" for name in COLUMNS)
    p50 = "" if verdict.recovery_p50_s is None else f"  p50 {verdict.recovery_p50_s} s  p99 {verdict.recovery_p99_s} s"
    return f"{'ok  ' if verdict.passed else 'BAD '} {text}{p50}  ({verdict.faults} faults, {verdict.took_s:.0f} s)"
