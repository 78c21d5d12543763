"""Shows live progress of runs: two lines redrawn on a terminal, or a line every 10 seconds where output is piped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from uuid import UUID

import typer
from rich.live import Live
from rich.text import Text

from app.cli.show import errors, say
from app.client import MegaFlow, ModelCheck, Run
from app.errors import MegaFlowError, WaitTimeout
from app.evaluation import Submission
from app.ledger.results import Progress
from app.models.outcome import Phase, TaskResult
from app.texts import clean, lasted

_LOOK_S = 1.0
_PIPED_EVERY_S = 10.0
_BAR = 20
_ESTIMATE_FROM = 3
"""The time left is shown when a third of the tasks has ended."""
_INTERRUPTED = 130
_TEARDOWN_LOOKS = 20


def submit_all(flow: MegaFlow, asked: Iterable[Submission], *, check: ModelCheck | None = None) -> list[Run]:
    """Submits runs that belong together. Raises: as `MegaFlow.submit`; runs accepted before are printed and go on."""
    runs: list[Run] = []
    try:
        for one in asked:
            runs.append(flow.submit(one, check=check))
    except MegaFlowError:
        for run in runs:
            say(f"run {run.id} was accepted before; `megaflow cancel {run.id}` ends it")
        raise
    return runs


def follow(flow: MegaFlow, watched: list[Run], *, timeout: float | None = None) -> list[TaskResult]:
    """Shows progress until all tasks have ended; returns their results in the order of submission.

    timeout: seconds. Ctrl-C leaves the runs as they are and prints how to go on.

    Raises: WaitTimeout; typer.Exit with 130 after Ctrl-C.
    """
    try:
        wait(flow, watched, timeout=timeout)
    except KeyboardInterrupt:
        _say_how_to_go_on(watched)
        raise typer.Exit(_INTERRUPTED) from None
    return _with_teardown(flow, [handle.task_id for run in watched for handle in run.handles])


def wait(flow: MegaFlow, watched: list[Run], *, timeout: float | None = None) -> None:
    """Shows progress until all tasks have ended. Raises: WaitTimeout."""
    run_ids, begun = [run.id for run in watched], time.monotonic()
    with display() as show:
        now = first = flow.installation.progress(run_ids)
        while True:
            elapsed_s = time.monotonic() - begun
            show(lines(now, elapsed_s, ended_before=first.ended))
            if now.done:
                return
            if timeout is not None and elapsed_s >= timeout:
                raise WaitTimeout(f"{now.total - now.ended} tasks had not ended after {timeout:g} s; they go on")
            time.sleep(_LOOK_S if timeout is None else min(_LOOK_S, max(0.01, timeout - elapsed_s)))
            now = flow.installation.progress(run_ids)


def lines(now: Progress, elapsed_s: float, *, ended_before: int = 0) -> list[str]:
    """Returns the lines of one moment. ended_before: tasks that had ended when the watching began."""
    filled = _BAR * now.ended // max(1, now.total)
    ended, left = now.ended - ended_before, now.total - now.ended
    parts = [f"{now.ended}/{now.total} ended", lasted(elapsed_s)]  # times first: a narrow terminal cuts the end
    if ended and left and now.ended * _ESTIMATE_FROM >= now.total:  # the first tasks to end are the quick ones
        parts.append(f"about {lasted(max(10.0, elapsed_s / ended * left))} left")
    for word, score, count in (("score", now.score, now.scored), ("scripted", now.scripted_score, now.scripted)):
        if count:
            parts.append(f"{word} {score or 0.0:.2f} of {count}")
    ends = (("not scored", now.failed), ("cancelled", now.cancelled), ("superseded", now.superseded))
    parts += [f"{count} {word}" for word, count in ends if count]
    first = f"[{'#' * filled}{'.' * (_BAR - filled)}] {', '.join(parts)}"
    if now.done:
        return [first]
    phases = ", ".join(f"{phase} {count}" for phase, count in now.running.items())
    states = [f"{now.waiting} queued", f"{now.starting} starting"]
    states.append(f"{sum(now.running.values())} running{f' ({phases})' if phases else ''}")
    return [first, ", ".join(states)]


@contextmanager
def display() -> Iterator[Callable[[list[str]], None]]:
    """Yields a function that shows lines: in place on a terminal, else the newest at most every 10 s, and the last."""
    if errors.is_terminal:
        with Live(console=errors, auto_refresh=False) as live:
            yield lambda now: live.update(
                Text("\n".join(map(clean, now)), no_wrap=True, overflow="ellipsis"), refresh=True
            )
        return
    printed_at = -_PIPED_EVERY_S

    def show(now: list[str]) -> None:
        nonlocal printed_at
        if len(now) == 1 or time.monotonic() - printed_at >= _PIPED_EVERY_S:
            printed_at = time.monotonic()
            errors.print("\n  ".join(now), soft_wrap=True)

    yield show


def _say_how_to_go_on(watched: list[Run]) -> None:
    if len(watched) == 1:
        run = str(watched[0].id)[-12:]
        say(f"interrupted: the run goes on. Watch it: megaflow status {run} --watch. End it: megaflow cancel {run}")
    else:
        say(f"interrupted: {len(watched)} runs go on. List them: megaflow runs. End one: megaflow cancel RUN")


def _with_teardown(flow: MegaFlow, task_ids: list[UUID]) -> list[TaskResult]:
    """Returns the results. Waits up to 2 s for the last teardown's time: an outcome is recorded before it."""
    for _ in range(_TEARDOWN_LOOKS):
        results = flow.installation.results(task_ids)
        late = [r for r in results if r.attempt and r.attempt.verdict and Phase.TORN_DOWN not in r.attempt.phases]
        if not late:
            break
        time.sleep(0.1)
    return results
