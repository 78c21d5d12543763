"""One suite for every kind of environment, run on each of `FIXTURES`."""

# ruff: noqa: F403

from megaflow.contract.environments.test_commands import *
from megaflow.contract.environments.test_files import *
from megaflow.contract.environments.test_life import *
from megaflow.contract.environments.test_ports import *
from megaflow.contract.environments.test_tools import *
