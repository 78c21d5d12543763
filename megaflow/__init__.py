"""MegaFlow's public names: `from megaflow import MegaFlow, AgentTask`.

They are defined in the package `app`, which is installed next to this one. If Python finds another package or module
named `app` first, importing a name from here raises an ImportError with this reason.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.client import Handle, MegaFlow, Run, as_completed
    from app.errors import MegaFlowError
    from app.models.outcome import TaskResult, Verdict
    from app.models.overrides import EnvironmentOverrides, LimitOverrides
    from app.models.spec import (
        AgentTask,
        EnvironmentSpec,
        Limits,
        Mode,
        ModelChoice,
        PatchSolution,
        ScriptGoal,
        ScriptSolution,
        TestsGoal,
    )

__all__ = [
    "AgentTask",
    "EnvironmentOverrides",
    "EnvironmentSpec",
    "Handle",
    "LimitOverrides",
    "Limits",
    "MegaFlow",
    "MegaFlowError",
    "Mode",
    "ModelChoice",
    "PatchSolution",
    "Run",
    "ScriptGoal",
    "ScriptSolution",
    "TaskResult",
    "TestsGoal",
    "Verdict",
    "as_completed",
]

_MODULES = ("app.errors", "app.models.spec", "app.models.overrides", "app.models.outcome", "app.client")
"""Modules that define the names, the fastest to import first."""


def check_app() -> None:
    """Raises: ImportError: `app` is another package than the one that belongs to this package."""
    module = import_module("app")
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    expected = os.path.join(folder, "app", "__init__.py")
    place = getattr(module, "__file__", None) or os.path.join(next(iter(module.__path__), "?"), "")
    if os.path.realpath(place) != os.path.realpath(expected):
        raise ImportError(
            f"expected MegaFlow's own package app in {os.path.dirname(expected)}, found another app at {place};"
            " rename that one, or leave its folder out of PYTHONPATH and of the current directory",
            name="app",
            path=place,
        )


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            check_app()
            for module in _MODULES:
                if (value := getattr(import_module(module), name, None)) is not None:
                    globals()[name] = value
                    return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
