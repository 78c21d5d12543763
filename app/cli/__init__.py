"""The `megaflow` command. One file per group of commands; this one joins them and turns errors into exit codes."""

from __future__ import annotations

import logging
import sys

import structlog
import typer
from pydantic import ValidationError

from app.cli import (
    agents,
    audit,
    budget,
    control,
    demo,
    environments,
    events,
    explain,
    images,
    limits,
    models,
    offers,
    replay,
    runs,
    schedules,
    shell,
    simulate,
    stack,
    usage,
    worker,
)
from app.errors import MegaFlowError

cli = typer.Typer(
    name="megaflow",
    help="Runs containerised agent tasks on Celery, and grades them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
stack.register(cli)
demo.register(cli)
runs.register(cli)
schedules.register(cli)
control.register(cli)
offers.register(cli)
limits.register(cli)
budget.register(cli)
usage.register(cli)
agents.register(cli)
models.register(cli)
replay.register(cli)
images.register(cli)
environments.register(cli)
agents.register(cli)
shell.register(cli)
explain.register(cli)
events.register(cli)
audit.register(cli)
simulate.register(cli)
worker.register(cli)


def main() -> None:
    """Run a command; a failure that has a name becomes one message and an exit code, never a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),  # standard output is for results
    )
    try:
        cli()
    except MegaFlowError as error:
        sys.stderr.write(f"megaflow: {error}\n")
        sys.exit(error.exit_code)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}, found {e['input']!r}" for e in error.errors())
        sys.stderr.write(f"megaflow: {faults}\n")
        sys.exit(64)
    except KeyboardInterrupt:
        sys.stderr.write("megaflow: interrupted; accepted tasks go on\n")
        sys.exit(130)
