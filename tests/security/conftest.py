"""Fixtures of the environment contract (`shared`, `own`, `create`, ...), for tests that give a fixture `fixture`."""

from __future__ import annotations

from megaflow.contract.environments.fixtures import create, own, provider, settings, shared, spec

__all__ = ["create", "own", "provider", "settings", "shared", "spec"]
