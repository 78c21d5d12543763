"""Installs every agent framework into the folder given: run while the worker image is built."""

import sys
from pathlib import Path

from app.agents.mini_swe_agent.adapter import MiniSweAgent

MiniSweAgent(Path(sys.argv[1])).check()
