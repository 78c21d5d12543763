"""Environments without isolation: a folder of this host and marked processes, for machines without an engine."""

from __future__ import annotations

from app.environments.runtimes.local.environment import LocalEnvironment
from app.environments.runtimes.local.folder import ENVIRONMENT, OWNER, end, nobodys
from app.environments.runtimes.local.provider import LocalProvider

__all__ = ["ENVIRONMENT", "OWNER", "LocalEnvironment", "LocalProvider", "end", "nobodys"]
