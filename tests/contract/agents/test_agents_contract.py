"""The agents' contract suite (`megaflow.contract.agents`) on ours, and on the example of an external one."""

# ruff: noqa: F403

from megaflow.contract.agents.test_ends import *
from megaflow.contract.agents.test_engine_faults import *
from megaflow.contract.agents.test_stops import *
