"""The cases, by what they break. Importing a module registers its cases."""

from __future__ import annotations

import importlib


def load(*, long: bool = False) -> None:
    """Register every case. `long`: the monkey's full three minutes."""
    for name in (
        "medley",
        "workers",
        "broker",
        "database",
        "doubt",
        "singletons",
        "hints",
        "people",
        "crowds",
        "pools",
        "engines",
        "clouds",
        "hosts",
        "monkey",
        "training",
        "train_command",
    ):
        module = importlib.import_module(f"tests.chaos.cases.{name}")
        if long and hasattr(module, "go_long"):
            module.go_long()
