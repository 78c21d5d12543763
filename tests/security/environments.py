"""Environments for attacks from inside: those that isolate, one of each runtime."""

from __future__ import annotations

from tests.contract.environment_fixtures import FIXTURES

RUNTIMES = [one.param() for one in FIXTURES if one.name in ("docker", "oci", "compose")]
"""For a fixture `fixture`, which `megaflow.contract.environments.fixtures` makes environments from."""
