"""`megaflow images log [NAME]`: what builds on this host said."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.later import later
from app.cli.show import as_json, console
from app.cli.tables import Table
from app.images.build_logs import BuildLogs, StoredBuildLog

if TYPE_CHECKING:
    from app.client import MegaFlow
else:
    MegaFlow = later("app.client", "MegaFlow")

_UNFINISHED = "under way, or cut short"
_HARMLESS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"} | {ord("\r"): "\n"}
"""What a recipe prints may not command the terminal of who reads it."""


def show_log(
    name: Annotated[
        str | None, typer.Argument(help="An image that was built, or its beginning, or a log; none: list the logs.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """What the last build of an image on this host said; without a name, which builds there were."""
    with MegaFlow() as flow:
        logs = BuildLogs(flow.settings)
    if name is None:
        _print_list(logs.all(), json=json)
        return
    kept = logs.of(name)
    if json:
        as_json({**_record(kept), "text": kept.text()})
        return
    text = kept.text()
    sys.stdout.write(text.translate(_HARMLESS) if sys.stdout.isatty() else text)


def _print_list(kept: list[StoredBuildLog], *, json: bool) -> None:
    if json:
        as_json([_record(one) for one in kept])
        return
    table = Table("log", "begun", "bytes", "outcome")
    for one in kept:
        begun = f"{one.begun_at.astimezone():%Y-%m-%d %H:%M:%S}"
        table.add_row(one.name, begun, str(one.size_bytes), one.outcome or _UNFINISHED)
    console.print(table)


def _record(one: StoredBuildLog) -> dict[str, str | int | None]:
    return {
        "log": one.name,
        "file": str(one.file),
        "begun_at": one.begun_at.isoformat(),
        "bytes": one.size_bytes,
        "outcome": one.outcome,
    }
