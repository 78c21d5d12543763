"""The `megaflow` commands that steer and explain, run in this process on the settings of a test."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from app.cli import control, explain, resource_classes, runs, schedules, submit
from app.settings import Settings


class CommandLine:
    """Runs a command; an error comes out as the exception that it is."""

    def __init__(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("app.client.load", lambda: settings)
        self._cli = typer.Typer()
        for group in (control, explain, resource_classes, runs, schedules, submit):
            group.register(self._cli)

    def __call__(self, *arguments: object) -> str:
        """What it printed."""
        result = CliRunner().invoke(self._cli, [str(argument) for argument in arguments])
        if result.exception is not None:
            raise result.exception
        return result.output

    def json(self, *arguments: object) -> Any:
        """What it printed with `--json`."""
        return json.loads(self(*arguments, "--json"))
