"""`megaflow demo`: the main job on the demo dataset, then its environments by every path, and what was seen of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from app.cli.later import later
from app.cli.orderly import ending_in_order
from app.cli.runs import follow, report
from app.cli.show import say
from app.cli.stack import where_flower_is
from app.errors import InstallationFailed
from app.models.outcome import TaskResult
from app.models.spec import AgentTask, EnvironmentKind, Mode, ModelChoice, Network, Reuse, ScriptSolution
from app.settings import Settings, load

if TYPE_CHECKING:
    from app.cli.demo_by_hand import ByHand, by_hand, place
    from app.cli.demo_seen import Asked, print_seen, seen_of, unexpected_paths
    from app.client import MegaFlow, Run
    from app.ledger import classes
else:
    ByHand = later("app.cli.demo_by_hand", "ByHand")
    by_hand = later("app.cli.demo_by_hand", "by_hand")
    place = later("app.cli.demo_by_hand", "place")
    Asked = later("app.cli.demo_seen", "Asked")
    print_seen = later("app.cli.demo_seen", "print_seen")
    seen_of = later("app.cli.demo_seen", "seen_of")
    unexpected_paths = later("app.cli.demo_seen", "unexpected_paths")
    MegaFlow = later("app.client", "MegaFlow")
    classes = later("app.ledger.classes")

EXPECTED = {"oracle": 1.0, "nop": 0.0, "mini-swe-agent": 1.0}
"""Agents of the demo, with the reward of each on every task. mini-swe-agent gets every other task: its start alone
costs five seconds of processor time."""
_FRESH_RUN, _SHARED_RUN = "demo-fresh", "demo-shared"
_REPLICAS, _SHARING = 4, 3
_SET_UP = "sleep 2 && date > /opt/made-by-the-set-up"
"""Stands for an installation."""
_READ_ONLY = "python-semver__python-semver-1"
"""Judged in an environment of its own, so that the agent's may be one that several have."""
_REGISTRY = "order-ledger"
_DISK_BYTES = 1 << 30
_THIS_HOST = ("127.0.0.1", "localhost", "::1")
_ASK = "python3 -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=20)' {} 2> /dev/null"


def register(cli: typer.Typer) -> None:
    cli.command()(demo)


def demo(
    environment: Annotated[
        EnvironmentKind | None, typer.Option(help="Default: docker, or local when no engine can be had.")
    ] = None,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Set everything up, run the demo dataset with three agents in both modes, and show the graded results.

    Expected: oracle 1 on every task, nop 0, mini-swe-agent solves them through the replay engine. In containers,
    environments that start from a kept set-up, are reset for the next task, and reach one host alone.
    """
    from app.stack import base_image, lifecycle
    from app.workers import evaluations

    begun = time.monotonic()
    settings = load()
    stack = lifecycle.up(settings, say)
    kind = environment or (EnvironmentKind.DOCKER if stack.engine.available else EnvironmentKind.LOCAL)
    contained = kind in (EnvironmentKind.DOCKER, EnvironmentKind.OCI)
    if kind is EnvironmentKind.DOCKER or (contained and stack.engine.available):
        base_image.ensure_base_image(settings, report=say)  # without it every task of the demo would fail
    if not contained:
        say("NO ISOLATION: tasks run in temporary folders of this host, in the environment `local`")
    with ending_in_order(), MegaFlow(settings) as flow, ExitStack() as held:
        tasks = evaluations.demo_tasks(settings, kind)
        runs = [run for agent in EXPECTED for run in _main_job(flow, agent, tasks, contained=contained)]
        say(f"{sum(len(run.handles) for run in runs)} tasks accepted in {len(runs)} runs")
        waited = _is_waited_for(flow, runs)
        found, beside = _followed(flow, runs, tasks, held, by_hand_too=contained)
        again = _again(flow, tasks, beside) if contained else {}
        if again:  # after the others, whose environments would take the place of those that are to be used again
            say(f"{sum(len(run.handles) for run in again.values())} more, for how their environments come about")
            found += follow(flow, list(again.values()))
        report(flow, [*runs, *again.values()], found, json=json)
    seen = seen_of(found)
    wrong = [*_unexpected(found), *beside.wrong]
    if again:
        asked = Asked(again[_FRESH_RUN].id, again[_SHARED_RUN].id, ahead=waited and settings.warm_environments > 0)
        wrong += unexpected_paths(seen, asked)
    if not json:
        print_seen(seen, beside.did)
        where_flower_is(settings)
    say(f"the demo took {time.monotonic() - begun:.0f} s; `megaflow down` stops everything")
    for line in wrong:
        say(line)
    if wrong:
        raise typer.Exit(1)


def _main_job(flow: MegaFlow, agent: str, tasks: list[AgentTask], *, contained: bool) -> list[Run]:
    """Every other task on an instance of its own, the others on the standing pool.

    contained: in containers; then some that ask a model have a network that leads to the model alone.
    """
    from app.workers.evaluations import REPLAY_MODEL

    if not tasks:
        raise InstallationFailed("expected the demo dataset inside the package, found none; reinstall")
    if agent == "mini-swe-agent":
        tasks = tasks[::2]
    if agent == "mini-swe-agent" and contained:
        tasks = [_with(task, network=Network.MODEL_ONLY) if task.environment.build else task for task in tasks]
    model = ModelChoice(name=REPLAY_MODEL) if flow.settings.model_base_url is None else None
    return [
        flow.enqueue_many(chosen, agent=agent, mode=mode, model=model, name=f"demo-{agent}-{mode}")
        for mode, chosen in ((Mode.EPHEMERAL, tasks[0::2]), (Mode.PERSISTENT, tasks[1::2]))
    ]


def _followed(
    flow: MegaFlow, runs: list[Run], tasks: list[AgentTask], held: ExitStack, *, by_hand_too: bool
) -> tuple[list[TaskResult], ByHand]:
    """The runs' results, and what was done beside them."""
    if not by_hand_too:
        return follow(flow, runs), ByHand()
    to, beside = place(flow.settings, held), Future[ByHand]()

    def work() -> None:
        try:
            beside.set_result(by_hand(flow, _named(tasks)[_REGISTRY], to, held))
        except BaseException as error:  # noqa: BLE001  a thread's edge: raised by whoever takes the result
            beside.set_exception(error)

    # A daemon: who ends the demo does not wait for what is done by hand.
    threading.Thread(target=work, name="by-hand", daemon=True).start()
    return follow(flow, runs), beside.result()


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A run for its environments' sake."""

    name: str
    agent: str
    task: AgentTask
    mode: Mode
    replicas: int


def _again(flow: MegaFlow, tasks: list[AgentTask], beside: ByHand) -> dict[str, Run]:
    """Tasks that are quick to solve and to judge: which paths their environments show is certain."""
    return {
        one.name: flow.enqueue_many([one.task], agent=one.agent, mode=one.mode, replicas=one.replicas, name=one.name)
        for one in _wanted(flow, tasks, beside)
    }


def _wanted(flow: MegaFlow, tasks: list[AgentTask], beside: ByHand) -> Iterator[_Wanted]:
    """Those that share one come first: together, they find places for all.

    Replicas share what one's set-up made, whoever ran it. More attempts than the pool has places for must use again
    what the first have given back.
    """
    named = _named(tasks)
    yield _Wanted(_SHARED_RUN, "nop", _with(named[_READ_ONLY], reuse=Reuse.SHARED_READONLY), Mode.PERSISTENT, _SHARING)
    merge = named["finish-merge"]
    yield _Wanted("demo-reuse", "oracle", _with(merge), Mode.PERSISTENT, _places(flow) + 2)
    yield _Wanted(_FRESH_RUN, "oracle", _with(merge, reuse=Reuse.FRESH), Mode.PERSISTENT, 2)
    set_up = _solved_if(named["lost-settings"], "test -s /opt/made-by-the-set-up", setup=(_SET_UP,))
    yield _Wanted("demo-set-up", "oracle", set_up, Mode.EPHEMERAL, _REPLICAS)
    host, url = _gateway(flow.settings)
    ask = f"(unset no_proxy NO_PROXY; {_ASK.format(url)} && ! {_ASK.format('http://example.invalid/')})"
    allowed = _solved_if(named["order-ledger"], ask, network=Network.ALLOWLIST, allowed_hosts=(host,))
    yield _Wanted("demo-allowlist", "oracle", allowed, Mode.EPHEMERAL, 1)
    if beside.sent is not None:
        yield _Wanted("demo-registry", "oracle", beside.sent.task, Mode.EPHEMERAL, 1)


def _places(flow: MegaFlow) -> int:
    """Tasks that the standing pool runs at once."""
    with flow.database.begin() as connection:
        offer = classes.load(connection, flow.settings)[classes.STANDARD]
    return offer.pool_max * offer.pool_slots


def _is_waited_for(flow: MegaFlow, runs: list[Run]) -> bool:
    """Whether so much of the main job has to wait for the standing pool that there is time to work ahead."""
    standing = runs[1::2]  # every other run is on instances of its own
    return sum(len(run.handles) for run in standing) > 2 * _places(flow)


def _named(tasks: list[AgentTask]) -> dict[str, AgentTask]:
    return {task.name: task for task in tasks}


def _with(task: AgentTask, **fields: Any) -> AgentTask:
    """The task with its environment changed, and a limit of the disk."""
    environment = task.environment
    resources = environment.resources.model_dump() | {"disk_bytes": _DISK_BYTES}
    changed = environment.model_dump() | {"resources": resources} | fields
    return AgentTask.model_validate(task.model_dump() | {"environment": changed})


def _solved_if(task: AgentTask, condition: str, **fields: Any) -> AgentTask:
    """The same; and its gold solution is applied only where a command that is run inside succeeds."""
    assert isinstance(task.solution, ScriptSolution)
    command = f"{condition} && {task.solution.command}"
    solution = task.solution.model_copy(update={"command": command})
    return _with(task, **fields).model_copy(update={"solution": solution})


def _gateway(settings: Settings) -> tuple[str, str]:
    """The model gateway as a task may name it on its list of hosts, and a page of it that answers everybody."""
    parts = urlsplit(settings.gateway_bases()[0])
    name = "localhost" if parts.hostname in _THIS_HOST else parts.hostname
    host = f"{name}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
    return host, f"{parts.scheme}://{host}/health"


def _unexpected(found: list[TaskResult]) -> list[str]:
    return [
        f"UNEXPECTED: {result.name} with {result.agent}: reward {result.reward}, expected {EXPECTED[result.agent]};"
        f" `megaflow show {str(result.task_id)[-12:]}`"
        for result in found
        if result.reward != EXPECTED[result.agent]
    ]
