"""Commands about images: `megaflow images sync`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from app import evaluation
from app.artifacts import open_store
from app.artifacts.bundles import fetch_bundle
from app.cli.show import Json, as_json, console, say
from app.client import MegaFlow
from app.datasets.selection import Selection
from app.errors import DatabaseUnavailable, SettingsInvalid
from app.evaluation import Submission
from app.host.slots import Semaphore
from app.images.compose_images import Parts
from app.images.sync import Sync, SyncOutcome, SyncResult, items_of
from app.settings import Settings
from app.workers.semaphores import LedgerSemaphore

images = typer.Typer(help="Images: fill a registry for a dataset.", no_args_is_help=True)
images.callback()(lambda: None)  # a group, although it has one command


@images.command()
def sync(
    dataset: Annotated[str, typer.Argument(help="As for `megaflow submit`.")],
    to: Annotated[
        str | None,
        typer.Option(help="Registry, HOST:PORT/PREFIX (port and prefix may be left out); default: the image mirror."),
    ] = None,
    task: Annotated[list[str] | None, typer.Option(help="Only this entry; may be repeated.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N entries.")] = None,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Images at a time; builds have a limit of their own.")] = 4,
    json: Json = False,
) -> None:
    """Build or copy every image of a dataset into a registry. Images that the registry has are skipped."""
    with MegaFlow() as flow:
        target = to or flow.settings.image_mirror
        if target is None:
            raise SettingsInvalid("expected a registry: give --to HOST[:PORT], or set MEGAFLOW_IMAGE_MIRROR.")
        submission = Submission(dataset=dataset, agent="nop", selection=Selection(only=tuple(task or ()), limit=limit))
        environments = [spec.task.environment for spec in evaluation.specs_of(submission, flow.settings)]
        parts = _parts(flow.settings)
        specs = [part for spec in environments for part in parts.of(spec)]
        items = items_of(specs, target, flow.settings.base_image)
        work = Sync(flow.settings, target, fetch_bundle=parts.fetch, semaphore=_semaphore(flow))
        rows = []
        for row in work.run(items, jobs=jobs):
            rows.append(row)
            say(f"{len(rows)}/{len(items)} {row.outcome.value}: {row.item.spec.label} {row.message or ''}".strip())
    counts = {outcome.value: sum(row.outcome is outcome for row in rows) for outcome in SyncOutcome}
    if json:
        as_json({"registry": target, **counts, "images": [_synced(row) for row in rows]})
    else:
        console.print(f"{target}: " + ", ".join(f"{n} {name}" for name, n in counts.items() if n), highlight=False)
    if any(row.outcome is SyncOutcome.FAILED for row in rows):
        raise typer.Exit(1)


def _synced(done: SyncResult) -> dict[str, Any]:
    return {
        "image": done.item.spec.label,
        "key": done.item.key,
        "target": done.item.target,
        "tasks": done.item.tasks,
        "outcome": done.outcome.value,
        "took_s": round(done.took_s, 3),
        "digest": done.digest,
        "error": done.error,
        "message": done.message,
    }


def _parts(settings: Settings) -> Parts:
    store = open_store(settings.artifacts(), endpoint_url=settings.s3_endpoint_url)
    return Parts(settings.home / "cache" / "contexts", lambda bundle: fetch_bundle(store, bundle))


def _semaphore(flow: MegaFlow) -> Semaphore | None:
    """Returns the fleet's semaphore; None without a ledger, so that this host's own limits apply."""
    try:
        with flow.database.begin():
            return LedgerSemaphore(flow.database, lease_s=flow.settings.lease_s)
    except DatabaseUnavailable as error:
        say(f"the limits of the fleet are not known: {error}")
        return None
