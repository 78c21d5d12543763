"""Commands about images: `megaflow images [list | sync | evict | log]`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from app import evaluation
from app.artifacts import open_store
from app.artifacts.bundles import fetch_bundle
from app.cli.show import Json, answer, as_json, console, say
from app.cli.tables import Table
from app.client import MegaFlow
from app.datasets.selection import Selection
from app.errors import DatabaseUnavailable, MegaFlowError, SettingsInvalid, UnknownName
from app.evaluation import Submission
from app.host.slots import Semaphore
from app.images import overview
from app.images.build_logs import BuildLogs
from app.images.cache import ImageCache, View
from app.images.compose_images import Parts
from app.images.metadata import ImageMetadata
from app.images.overview import ImageDemand, Line
from app.images.references import key_of
from app.images.sync import Sync, SyncOutcome, SyncResult, items_of
from app.ledger.upcoming import Upcoming
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from app.texts import lasted
from app.workers.semaphores import LedgerSemaphore

images = typer.Typer(help="Images: list, evict, read build logs, fill a registry for a dataset.")


def register(cli: typer.Typer) -> None:
    cli.add_typer(images, name="images")


@images.callback(invoke_without_command=True)
def _default(context: typer.Context, json: Json = False) -> None:
    if context.invoked_subcommand is None:
        show_list(all_images=False, json=json)


@images.command(name="list")
def show_list(
    all_images: Annotated[bool, typer.Option("--all", help="Also images that MegaFlow has no record of.")] = False,
    json: Json = False,
) -> None:
    """List images on this host: size, last use, need by the queue, order of eviction; and how full the disk is."""
    with MegaFlow() as flow:
        demand = _requested(flow)
        view = ImageCache(flow.settings).look()
    all_lines = overview.lines(view, demand)
    lines = [line for line in all_lines if all_images or line.used_at is not None]
    if json:
        as_json([asdict(line) for line in lines])
        return
    columns = ("image", "id", "size", "own", "last used", "containers", "needed", "goes")
    table = Table(*columns)
    for line in lines:
        table.add_row(*_cells(line))
    console.print(table)
    console.print(_summary(view), highlight=False)


def _cells(line: Line) -> list[str]:
    needed = "-" if line.needed_at is None else "now" if line.needed_at == 0 else f"#{line.needed_at}"
    return [
        line.image,
        line.id,
        _size(line.size_bytes),
        _size(line.own_bytes),
        "-" if line.used_at is None else f"{lasted((datetime.now(UTC) - line.used_at).total_seconds())} ago",
        str(line.containers),
        needed + (f", {line.waiting} tasks" if line.waiting else ""),
        line.stays or f"{line.goes}.",
    ]


def _summary(view: View) -> str:
    """Describes how full the disk is, and the marks between which images are evicted."""
    disk = view.disk
    seen = "not visible from here" if disk is None else f"{_size(disk.used_bytes)} of {_size(disk.total_bytes)} used"
    if disk is None and not view.marks.in_bytes:
        seen += "; give MEGAFLOW_IMAGE_DISK_HIGH and _LOW in bytes, a share means nothing here"
    marks = f"images go above {_mark(view.marks.high)} until {_mark(view.marks.low)}"
    return f"images take {_size(view.image_bytes)}; their disk: {seen}; {marks}"


@images.command()
def evict(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names or ids of images; none given: evict down to the low mark.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be evicted.")] = False,
    json: Json = False,
) -> None:
    """Remove images from this host: the named ones, else those that the queue needs last. Images in use stay."""
    with MegaFlow() as flow:
        _requested(flow)
        cache = ImageCache(flow.settings)
        view = cache.look()
        chosen = (
            [_named(view, name) for name in names] if names else view.victims(view.above(view.marks.low), time.time())
        )
        by_id = {image.id: image.names[0] if image.names else image.id for image in view.images}
        evicted = [by_id[i] for i in chosen] if dry_run else cache.evict(view, chosen)
    stayed = [by_id[i] for i in chosen if by_id[i] not in evicted]
    if json:
        as_json({"evicted": [] if dry_run else evicted, "would_evict": evicted if dry_run else [], "in_use": stayed})
    else:
        verb = "would go" if dry_run else "evicted"
        _print_outcomes([*((name, verb) for name in evicted), *((name, "in use, stays") for name in stayed)])
    if stayed and names:
        raise typer.Exit(1)


def _named(view: View, name: str) -> str:
    """Raises: UnknownName."""
    for image in view.images:
        if name in image.names or f"{name}:latest" in image.names or name in (image.id, image.held.keys):
            return image.id
    close = [image.id for image in view.images if len(name) >= 4 and image.id.removeprefix("sha256:").startswith(name)]
    if len(close) == 1:
        return close[0]
    raise UnknownName.of("image", name, sorted(name for image in view.images for name in image.names)[:30])


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


_HARMLESS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"} | {ord("\r"): "\n"}
"""Translation that removes control characters: a recipe's output must not control the reader's terminal."""


@images.command(name="log")
def show_log(
    name: Annotated[
        str | None, typer.Argument(help="A built image, the beginning of its name, or a log; none: list the logs.")
    ] = None,
    json: Json = False,
) -> None:
    """Print the last build log of an image on this host; without a name, list the logs, newest first."""
    with MegaFlow() as flow:
        logs = BuildLogs(flow.settings)
    if name is None:
        names = [file.stem for file in logs.files()]
        answer([{"log": one} for one in names], "\n".join(names) or "no build has a log", json=json)
        return
    file = logs.of(name)
    text = file.read_text(errors="replace")
    if json:
        as_json({"log": file.stem, "text": text})
    else:
        sys.stdout.write(text.translate(_HARMLESS) if sys.stdout.isatty() else text)


def _requested(flow: MegaFlow) -> dict[str, ImageDemand]:
    """Returns the images that the queue needs, and notes them for all processes of this host; {} without a ledger."""
    try:
        needs = Upcoming(flow.database, fair=flow.settings.dispatch_order == "fair").needs()
    except DatabaseUnavailable as error:
        say(f"the queue is not known: {error}")
        return {}
    demands: dict[str, ImageDemand] = {}
    parts = _parts(flow.settings)
    for need in needs:
        for key in _keys(parts, need.environment):
            position, tasks = demands.get(key, ImageDemand(need.position, 0))
            demands[key] = ImageDemand(position, tasks + need.tasks)
    ImageMetadata(flow.settings).note_queue(list(demands))
    return demands


def _keys(parts: Parts, spec: EnvironmentSpec) -> set[str]:
    try:
        return {key_of(part) for part in parts.of(spec)}
    except MegaFlowError as error:
        say(f"{spec.label}: which images it needs is not known: {error}")
        return set()


def _parts(settings: Settings) -> Parts:
    store = open_store(settings.artifacts(), endpoint_url=settings.s3_endpoint_url)
    return Parts(settings, fetch_bundle=lambda bundle: fetch_bundle(store, bundle))


def _semaphore(flow: MegaFlow) -> Semaphore | None:
    """Returns the fleet's semaphore; None without a ledger, so that this host's own limits apply."""
    try:
        with flow.database.begin():
            return LedgerSemaphore(flow.database, lease_s=flow.settings.lease_s)
    except DatabaseUnavailable as error:
        say(f"the limits of the fleet are not known: {error}")
        return None


def _print_outcomes(rows: Sequence[tuple[str, str]]) -> None:
    for name, outcome in rows:
        console.print(f"{outcome}: {name}", highlight=False, soft_wrap=True, markup=False)
    if not rows:
        console.print("nothing to do")


def _size(count: int) -> str:
    """Formats a size in decimal units, as `docker images` does."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _mark(mark: float) -> str:
    return _size(int(mark)) if mark > 1 else f"{mark:.0%}"
