"""The `megaflow` command: its options, and errors as one message and an exit code.

One file per group of commands, listed in `catalogue.py`; `group.py` loads the one that is asked for.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from app.cli.group import Commands
from app.errors import MegaFlowError, explained
from app.texts import clean

USAGE = 64
"""Exit code of a command line that is not understood, as in sysexits."""

_EXAMPLES = """\b
Examples:
  megaflow up                                       start everything here
  megaflow submit demo -a oracle --wait             run the demo dataset
  megaflow submit tasks/ -a mini-swe-agent -m NAME  run your tasks
  megaflow status RUN                               how a run stands
  megaflow submit --help                            all options of a command
"""

cli = typer.Typer(
    name="megaflow",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Rich takes longer to import than all the rest of the help
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EXAMPLES,
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"megaflow {version('megaflow')}")
        except PackageNotFoundError:  # run from its folder, not installed
            typer.echo("megaflow, not installed as a package")
        raise typer.Exit


@cli.callback()
def _megaflow(
    context: typer.Context,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask another machine's web server, with the token in MEGAFLOW_TOKEN. Default: MEGAFLOW_SERVER.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Runs containerised agent tasks on Celery, and grades them."""
    if server is not None:
        from app.settings import given

        context.with_resource(given(server=server))


def main() -> None:
    """Run a command. A failure that has a name becomes one message and an exit code, never a traceback."""
    try:
        code = cli(standalone_mode=False)
    except MegaFlowError as error:
        code = _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        error.show()  # type: ignore[attr-defined]  # click's own; Typer's public base class lacks it
        code = USAGE if error.exit_code == 2 else error.exit_code
    except typer.Abort:
        code = _fail("aborted", 1)
    except OSError as error:
        what = f"could not use {error.filename}: {error.strerror}; see that this user may write there"
        if error.filename is None:
            what = f"could not go on: {error.strerror or error}; see that the disk has room and the network answers"
        code = _fail(what, 74)
    except Exception as error:
        from pydantic import ValidationError

        if not isinstance(error, ValidationError):
            raise
        faults = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {explained(e)}; found {e['input']!r:.200}" for e in error.errors()
        )
        code = _fail(faults, USAGE)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:

    sys.stderr.write(f"megaflow: {clean(message)}\n")
    return code
