"""A stand-in for SWE-agent; see README.md. Like the real one it will not start without the folders of its checkout."""

import os
from pathlib import Path

__version__ = "1.1.0"
REPO_ROOT = Path(__file__).resolve().parent.parent
CONFIG_DIR = Path(os.getenv("SWE_AGENT_CONFIG_DIR", REPO_ROOT / "config"))
TOOLS_DIR = Path(os.getenv("SWE_AGENT_TOOLS_DIR", REPO_ROOT / "tools"))
TRAJECTORY_DIR = Path(os.getenv("SWE_AGENT_TRAJECTORY_DIR", REPO_ROOT / "trajectories"))
for _folder in (CONFIG_DIR, TOOLS_DIR, TRAJECTORY_DIR):
    assert _folder.is_dir(), _folder
for _name, _value in (("CONTEXT_GITHUB", "{}"), ("CONTEXT_NEEDS", "{}"), ("GITHUB_REPOSITORY", "octocat/Hello-World")):
    os.environ.setdefault(_name, _value)  # a library of the real one does so when it is imported
