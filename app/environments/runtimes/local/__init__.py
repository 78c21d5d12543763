"""Environments without isolation: a folder of this host and marked processes, for machines without an engine."""

from __future__ import annotations

from app.environments.runtimes.local.environment import LocalEnvironment, LocalProvider
from app.environments.runtimes.local.processes import (
    ENVIRONMENT,
    OWNER,
    remove_environment,
    unowned_folders,
)

__all__ = [
    "ENVIRONMENT",
    "OWNER",
    "LocalEnvironment",
    "LocalProvider",
    "remove_environment",
    "unowned_folders",
]
