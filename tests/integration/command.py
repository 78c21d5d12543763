"""The `megaflow` command, run in this process on the settings of a test."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import Result
from structlog.testing import capture_logs
from typer.testing import CliRunner

from app.cli import cli
from app.settings import Settings


class CommandLine:
    """Runs a command; an error comes out as the exception that it is."""

    def __init__(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.use(settings)

    def use(self, settings: Settings) -> None:
        """These from now on."""
        for module in ("app.client", "app.cli.agents", "app.cli.shell"):
            self._monkeypatch.setattr(f"{module}.load", lambda: settings)

    def run(self, *arguments: object) -> Result:
        """What became of it, where an exit code is what a test is about."""
        with capture_logs():  # which `main` keeps off standard output
            self.last = result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def __call__(self, *arguments: object) -> str:
        """What it printed, when it went well."""
        result = self.run(*arguments)
        if result.exception is not None:
            raise result.exception
        return result.output

    def json(self, *arguments: object) -> Any:
        """What it printed with `--json`."""
        return json.loads(self.run(*arguments, "--json").stdout)
