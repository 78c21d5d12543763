"""Runs any framework: on the worker or inside, with its time limit, its end and its files. See README.md."""

from __future__ import annotations

from app.agents.running.agent import FrameworkAgent

__all__ = ["FrameworkAgent"]
