"""Trajectories: joins an attempt's calls to conversations and writes them in ATIF. No I/O."""

from __future__ import annotations

from app.model_service.trajectory.artifact import export, read
from app.model_service.trajectory.atif import About, atif
from app.model_service.trajectory.tree import BranchKind, branches, join

__all__ = ["About", "BranchKind", "atif", "branches", "export", "join", "read"]
