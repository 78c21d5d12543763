"""Commands about doing a run again with the answers that its models gave: record, replay, compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from app.artifacts import open_store
from app.cli.later import later
from app.cli.progress import follow
from app.cli.show import as_json, console, reward, say
from app.cli.tables import Table
from app.errors import SpecInvalid, WaitTimeout
from app.models.outcome import Artifact, ArtifactKind, TaskResult
from app.models.spec import ModelChoice, TaskSpec
from app.models.states import ENDED_TASK

if TYPE_CHECKING:
    from app.client import MegaFlow, Run
    from app.ledger import accept, results
else:
    MegaFlow = later("app.client", "MegaFlow")
    accept = later("app.ledger.accept")
    results = later("app.ledger.results")

Named = Annotated[str, typer.Argument(help="A run's id, its end, or its name.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def register(cli: typer.Typer) -> None:
    for command in (record, replay, compare):
        cli.command()(command)


def record(
    run: Named,
    folder: Annotated[Path | None, typer.Option(help="Default: the home's recordings, under the run's id.")] = None,
) -> None:
    """Fetch what a run's models said, one file per task, for the replay engine (model `replay:NAME OF THE FOLDER`)."""
    with MegaFlow() as flow:
        run_id = results.find(flow.database, "runs", run)
        target = folder or flow.settings.recordings / str(run_id)
        written = fetch(flow, _results(flow, run_id), target)
        console.print(f"{written} attempts recorded in {target}", soft_wrap=True, highlight=False)


def replay(
    run: Named,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the end, and compare.")] = True,
    timeout: Annotated[float | None, typer.Option(help="Seconds to wait at most.")] = None,
    json: Json = False,
) -> None:
    """Do a run again with the recorded answers of its models: the same tasks, agents, modes and replicas.

    Compares patches and verdicts task by task; exit code 1 when any differ.
    """
    with MegaFlow() as flow:
        run_id = results.find(flow.database, "runs", run)
        before = _results(flow, run_id)
        fetch(flow, before, flow.settings.recordings / str(run_id))
        again = submit_again(flow, run_id, before)
        if not wait:
            console.print(f"run {again.id}: {len(again.handles)} tasks accepted; afterwards: megaflow compare"
                          f" {str(run_id)[-12:]} {str(again.id)[-12:]}")  # fmt: skip
            return
        say(f"run {again.id}: {len(again.handles)} tasks accepted, played from recording {run_id}")
        _report(flow, before, follow(flow, [again], timeout=timeout), json=json)


def compare(
    run: Named,
    other: Named,
    json: Json = False,
) -> None:
    """Compare patches and verdicts of two runs of the same tasks; exit code 1 when any differ."""
    with MegaFlow() as flow:
        one, two = (_results(flow, results.find(flow.database, "runs", name)) for name in (run, other))
        for result in (*one, *two):
            if result.state not in ENDED_TASK:
                raise WaitTimeout(
                    f"task {result.name} of run {result.run_id} has not ended; expected two runs that have"
                )
        _report(flow, one, two, json=json)


def _results(flow: MegaFlow, run_id: UUID) -> list[TaskResult]:
    return results.results(flow.database, results.task_ids(flow.database, run_id))


# --- Recording -------------------------------------------------------------------------------------------------------


def fetch(flow: MegaFlow, found: Sequence[TaskResult], folder: Path) -> int:
    """Write the calls of each task's last attempt into `folder`; how many there were.

    Raises: SpecInvalid: the run has none at all; ArtifactMissing, ArtifactStoreUnavailable.
    """
    from app.model_service.replay.recordings import file_name

    store = open_store(flow.settings.artifacts(), endpoint_url=flow.settings.s3_endpoint_url)
    written, missing = 0, ""
    for result in found:
        calls = _artifact(result, ArtifactKind.MODEL_CALLS)
        if calls is None or calls.key is None:
            missing = f"{result.name}: {calls.missing if calls else 'no attempt has ended'}"
            continue
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / file_name(result.name, result.replica, result.agent)
        part = target.with_name(f".{target.name}.part")
        part.write_bytes(store.get(calls.key))
        part.replace(target)  # an engine that reads at this moment sees the old or the new one
        written += 1
    if not written:
        raise SpecInvalid(
            f"expected a run whose attempts have recorded model calls; found none ({missing}); wait for its end, or"
            " choose a run whose agent uses a model"
        )
    return written


def submit_again(flow: MegaFlow, run_id: UUID, found: Sequence[TaskResult]) -> Run:
    """Accept the run's tasks once more, in the same order, with the recording as their model."""
    replicas = max(result.replica for result in found) + 1
    firsts = [result for result in found if result.replica == 0]
    if len(firsts) * replicas != len(found):
        raise SpecInvalid(f"expected {replicas} replicas of each of {len(firsts)} tasks, found {len(found)} tasks")
    specs = [_played(results.task_spec(flow.database, result.task_id), run_id) for result in firsts]
    status = flow.status(run_id)
    new = accept.NewRun(
        specs=specs, replicas=replicas, name=f"{status.name}-replay", user_name=status.user_name, purpose=status.purpose
    )
    accepted = accept.accept(flow.database, new, flow.settings)
    return flow.run(accepted.run_id, accepted.task_ids, accepted.names)


def _played(spec: TaskSpec, run_id: UUID) -> TaskSpec:
    if spec.model is None:
        return spec
    return spec.model_copy(update={"model": ModelChoice(name=f"replay:{run_id}", sampling=spec.model.sampling)})


# --- Comparing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pair:
    """One task as it went both times."""

    name: str
    replica: int
    patches: tuple[str, str]  # size and digest, or why there is none
    verdicts: tuple[str, str]
    differs: tuple[str, ...]  # in what: patch, reward, tests, end reason


def pairs(before: Sequence[TaskResult], after: Sequence[TaskResult]) -> list[Pair]:
    """Both runs task by task, in order.

    Raises: SpecInvalid: they are not runs of the same tasks.
    """
    if [_who(one) for one in before] != [_who(two) for two in after]:
        raise SpecInvalid(
            f"expected two runs of the same tasks and replicas, found {len(before)} and {len(after)} tasks; "
            "`megaflow replay RUN` makes such a pair"
        )
    return [_pair(one, two) for one, two in zip(before, after, strict=True)]


def _who(result: TaskResult) -> tuple[str, int, str]:
    return result.name, result.replica, result.agent


def _pair(one: TaskResult, two: TaskResult) -> Pair:
    patches = _artifact(one, ArtifactKind.PATCH), _artifact(two, ArtifactKind.PATCH)
    same = {
        "patch": _bytes_of(patches[0]) == _bytes_of(patches[1]),
        "reward": one.reward == two.reward,
        "tests": (one.verdict.tests if one.verdict else None) == (two.verdict.tests if two.verdict else None),
        "end reason": one.end_reason == two.end_reason,
    }
    return Pair(
        name=one.name,
        replica=one.replica,
        patches=(_patch(patches[0]), _patch(patches[1])),
        verdicts=(_verdict(one), _verdict(two)),
        differs=tuple(name for name, equal in same.items() if not equal),
    )


def _artifact(result: TaskResult, kind: ArtifactKind) -> Artifact | None:
    return next((artifact for artifact in result.artifacts if artifact.kind is kind), None)


def _bytes_of(patch: Artifact | None) -> tuple[str | None, int | None]:
    return (patch.sha256, patch.size_bytes) if patch is not None else (None, None)


def _patch(patch: Artifact | None) -> str:
    if patch is None or patch.sha256 is None:
        return "none"
    return f"{patch.size_bytes} bytes {patch.sha256[:12]}"


def _verdict(result: TaskResult) -> str:
    passed = sum(how == "passed" for how in result.verdict.tests.values()) if result.verdict else 0
    tests = f", {passed} of {len(result.verdict.tests)} tests" if result.verdict and result.verdict.tests else ""
    return f"{reward(result)}{tests}, {result.end_reason or result.state}"


def _report(flow: MegaFlow, before: Sequence[TaskResult], after: Sequence[TaskResult], *, json: bool) -> None:
    found = pairs(before, after)
    different = [pair for pair in found if pair.differs]
    if json:
        as_json([{name: getattr(pair, name) for name in pair.__dataclass_fields__} for pair in found])
    else:
        console.print(_table(found))
        console.print(f"{len(found) - len(different)} of {len(found)} tasks are the same in patch and verdict")
    if different:
        raise typer.Exit(1)


def _table(found: Sequence[Pair]) -> Table:
    table = Table()
    for column in ("task", "patch", "patch again", "verdict", "verdict again", "differs in"):
        table.add_column(column)
    for pair in found:
        name = f"{pair.name} #{pair.replica}" if pair.replica else pair.name
        table.add_row(name, *pair.patches, *pair.verdicts, ", ".join(pair.differs) or "-")
    return table
