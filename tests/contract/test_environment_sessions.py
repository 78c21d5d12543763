"""The suite's second half on each of `FIXTURES`: shells that remember, programs that are talked to, and too much."""

# ruff: noqa: F403

from megaflow.contract.environments.test_limits import *
from megaflow.contract.environments.test_shells import *
from megaflow.contract.environments.test_streams import *
