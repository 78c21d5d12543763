"""MegaFlow: runs tens of thousands of containerised agent tasks, and grades them.

The way of one task:

    enqueue -> admission -> Celery queue by mode -> worker on an instance -> environment -> agent <-> model
                                                                                             |
                                              waiting client <- outcome <- artifacts <- grading

A producer needs three names: `MegaFlow` accepts tasks, `AgentTask` describes one, `as_completed` waits for many.
"""

from __future__ import annotations

from app.client import Handle, MegaFlow, Run, as_completed
from app.models.outcome import TaskResult, Verdict
from app.models.spec import AgentTask, EnvironmentSpec, Limits, Mode, ModelChoice

__all__ = [
    "AgentTask",
    "EnvironmentSpec",
    "Handle",
    "Limits",
    "MegaFlow",
    "Mode",
    "ModelChoice",
    "Run",
    "TaskResult",
    "Verdict",
    "as_completed",
]
