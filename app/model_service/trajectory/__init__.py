"""Trajectories: joins an attempt's calls to conversations and writes them in ATIF. No I/O."""

from __future__ import annotations

from app.model_service.trajectory.artifact import export, read
from app.model_service.trajectory.atif import About, atif
from app.model_service.trajectory.branches import Branch, BranchKind, branches
from app.model_service.trajectory.tree import Forest, Node, join

__all__ = [
    "About",
    "Branch",
    "BranchKind",
    "Forest",
    "Node",
    "atif",
    "branches",
    "export",
    "join",
    "read",
]
