"""Fixtures of the environment contract (`shared`, `own`, `create`, ...), for tests that give a fixture `ground`."""

from __future__ import annotations

from app.environments.contract.fixtures import create, own, provider, settings, shared, spec

__all__ = ["create", "own", "provider", "settings", "shared", "spec"]
