"""Runs any framework: where it runs, its time, its end, what it leaves. See README.md."""

from __future__ import annotations

from app.agents.running.agent import FrameworkAgent

__all__ = ["FrameworkAgent"]
