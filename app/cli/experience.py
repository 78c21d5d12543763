"""Commands about training samples: `megaflow experience open | status | serve`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from app import logs
from app.cli.runs import NamedRun
from app.cli.show import Json, answer, as_json, console
from app.cli.tables import Table
from app.client import MegaFlow
from app.ledger import experience as ledger
from app.ledger import results
from app.ledger.dropped import dropped, unused
from app.ledger.experience import ExperienceRun
from app.stack.home import prepare

experience = typer.Typer(
    help="Training samples: choose the runs that feed a trainer, serve samples over HTTP.", no_args_is_help=True
)


@experience.command(name="open")
def open_run(
    run: NamedRun,
    policy: Annotated[str, typer.Option(help="The model's stable name.")],
    quorum: Annotated[
        int | None, typer.Option(min=1, help="Replicas that complete a group; default: the run's quorum, or all.")
    ] = None,
    drop_equal: Annotated[
        bool, typer.Option("--drop-equal", help="Leave out groups whose rewards are all equal.")
    ] = False,
    max_staleness: Annotated[
        int | None,
        typer.Option(min=0, help="Versions that a sample may be behind; tasks do not run further ahead."),
    ] = None,
    json: Json = False,
) -> None:
    """Turn the attempts of a training run into samples. The first call fixes all options but --max-staleness."""
    with MegaFlow() as flow:
        run_id = results.find(flow.database, "runs", run)
        options = ExperienceRun(run_id, policy, quorum=quorum, drop_equal=drop_equal, max_staleness=max_staleness)
        ledger.open_run(flow.database, options)
        groups = ledger.counts(flow.database, run_id)
    text = f"run {run_id}: its attempts become samples of {policy}; `megaflow experience status` counts them"
    answer({"run_id": run_id, "groups": groups}, text, json=json)


@experience.command()
def status(run: NamedRun, json: Json = False) -> None:
    """Show a run's groups by state, its added replicas, and what was superseded, by length of the trajectories."""
    with MegaFlow() as flow:
        run_id = results.find(flow.database, "runs", run)
        groups, lost = ledger.counts(flow.database, run_id), dropped(flow.database, run_id)
        idle = unused(flow.database, run_id)
    if json:
        as_json({"run_id": run_id, "groups": groups, "dropped": lost, "unused": idle})
        return
    states = ", ".join(f"{count} {state}" for state, count in asdict(groups).items() if count)
    console.print(f"run {run_id}: {states or 'no'} groups")
    for reason, count in idle.items():
        console.print(f"{count} attempts feed no trainer: {reason}", markup=False)
    added = "".join(f", {count} added for {why}" for why, count in sorted(lost.added.items()))
    dollars = f", ${lost.waste_usd:,.4f}" if lost.waste_usd else ""
    console.print(f"{lost.superseded} replicas superseded{added}")
    console.print(f"waste: {lost.waste_tokens:,} of {lost.tokens:,} answer tokens{dollars}")
    table = Table("answer tokens", "ended", "superseded", "share", right=("ended", "superseded", "share"))
    for one in lost.by_length:
        length = "more" if one.below is None else f"below {one.below:,}"
        table.add_row(length, str(one.ended), str(one.superseded), f"{100 * one.share:.0f} %")
    console.print(table)


@experience.command()
def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; default: the setting `bind`, loopback.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 8767,
    lease: Annotated[
        float, typer.Option(min=0.1, max=86_400, help="Seconds of a consumer's lease on a batch.")
    ] = 600.0,
) -> None:
    """Serve samples of all open runs over HTTP, until a signal stops it.

    Requests need the token of the setting `experience_token`. Without it, one is created and stored in `home`/run.
    """
    from app.experience.server import ExperienceServer, token_of
    from app.experience.server import serve as serving

    with MegaFlow() as flow:
        prepare(flow.settings)
        logs.configure(flow.settings.log_level)
        server = ExperienceServer(flow.database, flow.store, token=token_of(flow.settings), lease_s=lease)
        serving(server, host=host or flow.settings.bind, port=port)
