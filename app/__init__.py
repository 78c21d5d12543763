"""MegaFlow: runs tens of thousands of containerised agent tasks, and grades them.

The way of one task:

    enqueue -> admission -> Celery queue by mode -> worker on an instance -> environment -> agent <-> model
                                                                                             |
                                              waiting client <- outcome <- artifacts <- grading

The documented import is the package `megaflow`. A producer needs three names: `MegaFlow` accepts tasks, `AgentTask`
describes one, `as_completed` waits for many.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.client import Handle, MegaFlow, Run, as_completed
    from app.models.outcome import TaskResult, Verdict
    from app.models.overrides import EnvironmentOverrides, LimitOverrides
    from app.models.spec import AgentTask, EnvironmentSpec, Limits, Mode, ModelChoice

__all__ = [
    "AgentTask",
    "EnvironmentOverrides",
    "EnvironmentSpec",
    "Handle",
    "LimitOverrides",
    "Limits",
    "MegaFlow",
    "Mode",
    "ModelChoice",
    "Run",
    "TaskResult",
    "Verdict",
    "as_completed",
]

_PLACES = ("app.models.spec", "app.models.overrides", "app.models.outcome", "app.client")
"""Where these names are from, the lightest first. Loaded when one is asked for: every MegaFlow program imports this
package, and few need a client."""

if not TYPE_CHECKING:  # or a wrong name would be found when it runs, not when it is checked

    def __getattr__(name: str) -> Any:
        if name in __all__:
            for place in _PLACES:
                if (found := getattr(import_module(place), name, None)) is not None:
                    globals()[name] = found
                    return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
