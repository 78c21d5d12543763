"""Installs what instances have without a network into the folder given: run while the worker image is built.

The other frameworks are installed once for each deployment, with the first task that needs them: docs/howto/cluster.md.
"""

import sys
from pathlib import Path

from app.agents.installation import Installer
from app.agents.mini_swe_agent.adapter import MiniSweAgent

if __name__ == "__main__":
    MiniSweAgent(Installer(Path(sys.argv[1]))).install()
