"""Undoes the launcher's changes to the environment; a bundle's Python runs it first, as its sitecustomize.

The loader reads its variable only once, and has already done so.
"""

import os
import sys

_launcher = os.environ.pop("MEGAFLOW_LAUNCHER", None)
if _launcher is not None:
    for _name in ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH"):
        os.environ.pop(_name, None)
        _kept = os.environ.pop("MEGAFLOW_KEPT_" + _name, None)
        if _kept is not None:
            os.environ[_name] = _kept
    sys.executable = sys._base_executable = _launcher  # type: ignore[attr-defined]
