"""Environments for attacks from inside: those that isolate, one of each runtime."""

from __future__ import annotations

from tests.contract.environment_grounds import GROUNDS

RUNTIMES = [one.param() for one in GROUNDS if one.name in ("docker", "oci", "compose")]
"""For a fixture `ground`, which `megaflow.contract.environments.fixtures` makes environments from."""
