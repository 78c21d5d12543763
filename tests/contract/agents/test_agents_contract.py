"""The agents' contract suite (`app.agents.contract`) on ours, and on the example of an external one."""

# ruff: noqa: F403

from app.agents.contract.test_ends import *
from app.agents.contract.test_engine_faults import *
from app.agents.contract.test_stops import *
