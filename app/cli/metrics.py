"""`megaflow metrics`: everything that Prometheus would read."""

from __future__ import annotations

import sys

import typer

from app.client import MegaFlow
from app.control.metrics import exposition


def register(cli: typer.Typer) -> None:
    cli.command()(metrics)


def metrics() -> None:
    """Print all metrics in Prometheus' text format, as the control worker serves them at MEGAFLOW_METRICS_PORT."""
    with MegaFlow() as flow:
        sys.stdout.write(exposition(flow.settings, flow.database))
