"""What the tests of frameworks' adapters share: a job, where a framework works, and how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import SecretStr

from app.agents.base import AgentJob, ModelEndpoint
from app.agents.framework import Ended, FrameworkPaths, Stop
from app.models.spec import Limits

KEY = "sk-a-secret-that-must-not-leak-0123456789"
TASK = "Mend it.\n{{ braces }} and 'quotes' $(as they are)"


def a_job(scratch: Path = Path("/nowhere"), **changes: Any) -> AgentJob:
    """A task without a solution; a framework gets its model from its place."""
    fields = {"task_name": "t", "description": TASK, "workdir": "/testbed", "limits": Limits(), "model": None}
    return AgentJob(**{**fields, "solution": None, "solution_files": None, "scratch": scratch, **changes})


def a_place(tool: str = "/tool", workdir: str = "/testbed") -> FrameworkPaths:
    model = ModelEndpoint("http://127.0.0.1:4000/v1", "a-model", SecretStr(KEY))
    return FrameworkPaths(tool=tool, home="/home-of-it", workdir=workdir, model=model)


def ended(home: Path, returncode: int = 1, *, said: str = "", printed: str = "") -> Ended:
    (home / "out").write_text(printed)
    (home / "err").write_text(said)
    return Ended(Stop.ITSELF, returncode, home / "out", home / "err", home)
