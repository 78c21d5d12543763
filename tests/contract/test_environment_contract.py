"""One suite for every kind of environment, run on each of `GROUNDS`."""

# ruff: noqa: F403

from app.environments.contract.test_commands import *
from app.environments.contract.test_files import *
from app.environments.contract.test_life import *
from app.environments.contract.test_ports import *
from app.environments.contract.test_snapshots import *
from app.environments.contract.test_tools import *
